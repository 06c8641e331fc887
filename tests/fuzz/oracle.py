"""Expected results of training a case: NumPy in float64, from the definitions; nothing of recsys.

One loss per rank, ``sum(output * factor)``; tables learn from the mean over ranks of its gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.cases import Batch, Case, Table

EPS, BETA1, BETA2 = 1e-2, 0.9, 0.999


def initial(table: Table) -> np.ndarray:
    """``[rows, dim]``."""
    seed = sum(map(ord, table.name))
    return np.sin(seed + 1.3 * np.arange(table.rows)[:, None] + 0.7 * np.arange(table.dim))


def factors(shape: tuple[int, ...], rank: int, step: int) -> np.ndarray:
    """Return the factors of a rank's outputs in its loss."""
    numbers = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)
    return np.cos(0.37 * numbers + rank + 2.0 * step)


def names_of(case: Case) -> list[tuple[Table, str]]:
    """The table and feature of each output, in order."""
    return [(table, feature) for table in case.tables for feature in table.features]


def _terms(table: Table, feature: str, batch: Batch, sample: int) -> list[tuple[int, float]]:
    """Rows and factors that add up to a sample's pooled embedding."""
    place = batch.bag_of(feature, sample)
    bag = batch.bags[feature][place]
    weights = [1.0] * len(bag) if batch.weights is None else batch.weights[feature][place]
    share = 1.0 / len(bag) if table.mean and bag else 1.0
    return [(row, weight * share) for row, weight in zip(bag, weights, strict=True)]


def outputs_of(case: Case, tables: dict[str, np.ndarray], batch: Batch) -> list[np.ndarray]:
    """One ``[samples, sum of dims]``; of sequences per output ``[ids, dim]``."""
    if case.sequence:
        return [
            tables[table.name][[row for bag in batch.bags[feature] for row in bag]]
            for table, feature in names_of(case)
        ]
    columns = []
    for table, feature in names_of(case):
        pooled = np.zeros((batch.num_samples, table.dim))
        for sample in range(batch.num_samples):
            for row, share in _terms(table, feature, batch, sample):
                pooled[sample] += share * tables[table.name][row]
        columns.append(pooled)
    return [np.concatenate(columns, axis=1)]


def _gradients(
    case: Case, batch: Batch, rank: int, step: int, into: dict[str, dict[int, np.ndarray]]
) -> None:
    """Adds a rank's share of the gradient of each row that its batch mentions."""

    def add(table: Table, row: int, gradient: np.ndarray) -> None:
        rows = into[table.name]
        rows[row] = rows.get(row, np.zeros(table.dim)) + gradient / case.world

    if case.sequence:
        for table, feature in names_of(case):
            ids = [row for bag in batch.bags[feature] for row in bag]
            for row, factor in zip(ids, factors((len(ids), table.dim), rank, step), strict=True):
                add(table, row, factor)
        return
    outputs = names_of(case)
    width = sum(table.dim for table, _ in outputs)
    factor_SW = factors((batch.num_samples, width), rank, step)
    at = 0
    for table, feature in outputs:
        for sample in range(batch.num_samples):
            for row, share in _terms(table, feature, batch, sample):
                add(table, row, share * factor_SW[sample, at : at + table.dim])
        if batch.inverse is not None:  # a bag that no sample reads has a gradient, too: of 0
            for row in (row for bag in batch.bags[feature] for row in bag):
                add(table, row, np.zeros(table.dim))
        at += table.dim


def _update(
    case: Case, weight: np.ndarray, state: dict[str, Any], rows: dict[int, np.ndarray]
) -> None:
    state["step"] = state.get("step", 0) + 1
    for row, g in rows.items():
        if case.optimizer == "sgd":
            weight[row] -= case.rate * g
        elif case.optimizer == "adam":
            m, v = state.get(row, (np.zeros_like(g), np.zeros_like(g)))
            m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
            state[row] = m, v
            m_hat, v_hat = m / (1 - BETA1 ** state["step"]), v / (1 - BETA2 ** state["step"])
            weight[row] -= case.rate * m_hat / (np.sqrt(v_hat) + EPS)
        else:
            moment = np.mean(g * g) if case.optimizer == "rowwise_adagrad" else g * g
            state[row] = state.get(row, 0.0) + moment
            weight[row] -= case.rate * g / (np.sqrt(state[row]) + EPS)


def train(case: Case) -> tuple[list[list[list[np.ndarray]]], dict[str, np.ndarray]]:
    """Outputs by step and rank, and the tables after the last step."""
    tables = {table.name: initial(table) for table in case.tables}
    states: dict[str, dict[str, Any]] = {table.name: {} for table in case.tables}
    outputs = []
    for step, batches in enumerate(case.steps):
        outputs.append([outputs_of(case, tables, batch) for batch in batches])
        gradients: dict[str, dict[int, np.ndarray]] = {name: {} for name in tables}
        for rank, batch in enumerate(batches):
            _gradients(case, batch, rank, step, gradients)
        for name, rows in gradients.items():
            _update(case, tables[name], states[name], rows)
    return outputs, tables
