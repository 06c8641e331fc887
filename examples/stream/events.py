"""Clicks as they arrive: from a file that grows, or from a topic of Kafka.

An event is a line or a message of JSON: `{"time": seconds, "user": id, "item": id, "clicked": 0}`;
ids are any integers of 64 bits. Other lines are left out. A source has a state with the positions
up to which events were read, which is saved with the model, so that a job that starts again reads
each event once.
"""

from __future__ import annotations

import json
import operator
import sys
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def well_formed(lines: list[bytes], source: object) -> list[Event]:
    """Return the events of lines, and print the other lines, which are left out.

    An error would end the job, and the next job would read the same line again.
    """
    found = []
    for line in lines:
        try:
            event = json.loads(line)
            ids = [operator.index(event[name]) for name in ("user", "item")]
            if not all(-(2**63) <= number < 2**63 for number in ids):
                raise ValueError("ids must have 64 bits")
            if event["clicked"] not in (0, 1):
                raise ValueError("clicked must be 0 or 1")
            found.append(event)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            print(
                f"{source}: left out {line.strip()[:80]!r}: {error!r}", file=sys.stderr, flush=True
            )
    return found


class FileEvents:
    """Complete lines of a file that grows; each rank reads some of them.

    Args:
        path: The file; it may appear later.
        rank: Number of this rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, path: Path, rank: int = 0, num_ranks: int = 1) -> None:
        self.path, self.rank, self.num_ranks = path, rank, num_ranks
        self.position, self.line = 0, 0

    def read(self, limit: int, seconds: float) -> list[Event]:
        """Return up to `limit` new events; wait for one at most so long."""
        deadline = time.monotonic() + seconds
        while not (found := self._new_lines(limit)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return well_formed(found, self.path)

    def _new_lines(self, limit: int) -> list[bytes]:
        found: list[bytes] = []
        if not self.path.exists():
            return found
        with self.path.open("rb") as file:
            file.seek(self.position)
            while len(found) < limit and (line := file.readline()).endswith(b"\n"):
                if self.line % self.num_ranks == self.rank:
                    found.append(line)
                self.line += 1
                self.position += len(line)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the positions."""
        return {"position": self.position, "line": self.line}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the positions."""
        self.position, self.line = state["position"], state["line"]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Continue at the first position of another number of ranks; some events are read twice."""
        self.load_state_dict(min(states, key=lambda state: state["position"]))


class KafkaEvents:
    """Messages of a topic; each rank reads some of its partitions.

    Kafka keeps no positions: they are part of the checkpoint.

    Args:
        servers: Addresses of brokers, such as "127.0.0.1:9092".
        topic: The topic.
        rank: Number of this rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, servers: str, topic: str, rank: int = 0, num_ranks: int = 1) -> None:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        self.partition = TopicPartition
        self.topic = topic
        settings = {"bootstrap.servers": servers, "group.id": "train", "enable.auto.commit": False}
        self.consumer = Consumer(settings)
        partitions = self.consumer.list_topics(topic, timeout=30).topics[topic].partitions
        own = [number for number in sorted(partitions) if number % num_ranks == rank]
        self.offsets = dict.fromkeys(own, OFFSET_BEGINNING)
        self.is_assigned = False

    def _assign(self) -> None:
        # Not before the first read: after a second assignment the client may return messages that
        # it requested for the first one.
        self.consumer.assign([self.partition(self.topic, n, o) for n, o in self.offsets.items()])
        self.is_assigned = True

    def read(self, limit: int, seconds: float) -> list[Event]:
        """Return up to `limit` new events; wait for one at most so long."""
        if not self.is_assigned:
            self._assign()
        found = []
        messages = self.consumer.consume(1, timeout=seconds) if self.offsets else []
        messages += self.consumer.consume(limit - 1, timeout=0.01) if messages else []
        for message in messages:
            if message.error() is not None:
                raise OSError(f"Reading {self.topic!r} failed: {message.error().str()}")
            found.append(message.value() or b"")
            self.offsets[message.partition()] = message.offset() + 1
        return well_formed(found, self.topic)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions."""
        return {"offsets": [list(item) for item in self.offsets.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the positions."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Continue at the offsets of any number of ranks."""
        saved = dict(item for state in states for item in state["offsets"])
        self.offsets |= {number: saved[number] for number in self.offsets if number in saved}
        self.is_assigned = False
