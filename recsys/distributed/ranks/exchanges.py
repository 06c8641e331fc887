"""Names of the exchanges of tensors between ranks."""

from enum import StrEnum, unique


@unique
class ExchangeName(StrEnum):
    """The exchanges of tensors. The value completes a message: "rank 0 waits to ..."."""

    ID_COUNTS = "exchange id counts"
    IDS = "send ids to their owners"
    ROWS_OF_IDS = "send the rows of ids back"
    EMBEDDINGS = "send embeddings back"
    EMBEDDINGS_IN_NODE = "add up embeddings inside a node"
    GRADIENTS = "send gradients to the tables"
    GRADIENTS_IN_NODE = "send gradients back inside a node"
    GRADIENTS_OF_WEIGHTS = "send the gradients of weights back"
    GRADIENTS_OF_REPLICAS = "add up gradients of replicated tables"
    ROW_STATISTICS = "add up row statistics"
    AVERAGES = "average the tables of all groups"
    DENSE_VALUES = "broadcast dense values"
    TABLE_MOVES = "move tables to other ranks"
    TABLE_VALUES = "fill the tables"
    QUANTIZED_ROWS = "quantize the tables"
    POOL_IDS = "send ids to a pool"
    POOL_ROWS = "send rows of a pool"
