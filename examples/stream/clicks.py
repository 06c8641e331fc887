"""Write made-up clicks to a file or a topic of Kafka, at a steady rate; ids come and go.

    python examples/stream/clicks.py --events runs/stream/clicks --rate 2000

The probability of a click follows from how active its user is and how popular its item is.
"""

import argparse
import functools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ACTIVE = 2000  # users and items at a time
LIFE = 60.0  # seconds in which half of them are replaced


@functools.cache
def effect(number: int) -> float:
    """Return how much a user or item changes the logit of a click."""
    return random.Random(number).gauss(0, 1.5)


def click(rng: random.Random, seconds: float) -> dict[str, float]:
    """Return a click at a time since the start."""
    first = int(seconds / LIFE * ACTIVE / 2)
    numbers = [first + int(ACTIVE * rng.random() ** 2) for _ in range(2)]
    user, item = (hashed(f"{kind} {n}") for kind, n in zip(("user", "item"), numbers, strict=True))
    clicked = rng.random() < 1 / (1 + math.exp(1 - effect(user) - effect(item)))
    return {"time": time.time(), "user": user, "item": item, "clicked": int(clicked)}


@functools.cache
def hashed(name: str) -> int:
    """Return a 64-bit id of a name."""
    return random.Random(name).getrandbits(64) - 2**63


def clicks(rate: float, seconds: float) -> Iterator[dict[str, float]]:
    """Yield clicks at a rate per second."""
    rng, start, count = random.Random(0), time.monotonic(), 0
    while (now := time.monotonic() - start) < seconds:
        while count < now * rate:
            count += 1
            yield click(rng, now)
        time.sleep(0.01)


def sender(options: argparse.Namespace) -> tuple[Callable[[bytes], None], Callable[[], object]]:
    """Return functions that send an event, and wait until all are sent."""
    if options.kafka:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": options.kafka})
        return lambda event: producer.produce(options.topic, event), producer.flush
    options.events.parent.mkdir(parents=True, exist_ok=True)
    file = options.events.open("ab", buffering=0)
    return lambda event: file.write(event + b"\n") and None, file.close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=Path, default=Path("runs/stream/clicks"))
    parser.add_argument("--kafka", help="addresses of brokers; instead of a file")
    parser.add_argument("--topic", default="clicks")
    parser.add_argument("--rate", type=float, default=2000.0, help="clicks per second")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    options = parser.parse_args()
    send, end = sender(options)
    for event in clicks(options.rate, options.seconds):
        send(json.dumps(event).encode())
    end()


if __name__ == "__main__":
    main()
