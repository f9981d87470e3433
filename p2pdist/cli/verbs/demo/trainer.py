"""The program that the demo ships as its app layer: fits a small network to points on two spirals
and says where it came from.

It runs on its own, from the merged view of base and app layer: it imports nothing of this project,
only what lies beside it and numpy from the base layer. Its last line is a JSON document with the
loss before and after and the files it was started from.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np


def two_spirals(points: int, seed: int) -> tuple[Any, Any]:
    """`points` points (x, y) on two interleaved spirals with a little noise, and the spiral (0 or
    1) of each."""
    random = np.random.default_rng(seed)
    label = random.integers(0, 2, points)
    turn = random.uniform(0.25, 1.75, points) * 2 * np.pi
    angle = turn + np.pi * label
    radius = turn / (2 * np.pi)
    position = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return position + random.normal(0, 0.02, (points, 2)), label.astype(float)


def train(settings: dict[str, Any], embedding: Any) -> tuple[float, float]:
    """Gradient descent with momentum on one hidden layer over fixed random features; returns the
    first and the last loss (nats)."""
    position, label = two_spirals(settings["points"], settings["seed"])
    inputs = np.tanh(position @ (3.0 * embedding[:2, : settings["features"]]) + embedding[2, : settings["features"]])
    random = np.random.default_rng(settings["seed"])
    hidden = random.normal(0, settings["features"] ** -0.5, (settings["features"], settings["hidden"]))
    output = random.normal(0, settings["hidden"] ** -0.5, settings["hidden"])
    speed_hidden, speed_output = np.zeros_like(hidden), np.zeros_like(output)
    first = last = 0.0
    for step in range(settings["steps"]):
        active = np.tanh(inputs @ hidden)
        score = active @ output
        last = float(np.mean(np.logaddexp(0, score) - label * score))
        first = first if step else last
        if step % max(1, settings["steps"] // 5) == 0:
            print(f"step {step:5d}  loss {last:.4f}", flush=True)
        error = (1 / (1 + np.exp(-score)) - label) / len(label)
        back = np.outer(error, output) * (1 - active**2)
        speed_output = 0.9 * speed_output - settings["learning_rate"] * (active.T @ error)
        speed_hidden = 0.9 * speed_hidden - settings["learning_rate"] * (inputs.T @ back)
        output += speed_output
        hidden += speed_hidden
    return first, last


def main() -> None:
    """Train with the settings and the embedding that lie beside this file."""
    began = time.monotonic()
    here = Path(__file__).resolve().parent
    settings = json.loads((here / "settings.json").read_text())
    embedding = np.frombuffer((here / "embedding.bin").read_bytes(), dtype="<f4").reshape(4, -1)
    first, last = train(settings, embedding)
    result = {
        "version": settings["version"],
        "loss_first": round(first, 4),
        "loss_last": round(last, 4),
        "seconds": round(time.monotonic() - began, 3),
        "program": str(Path(__file__).resolve()),
        "numpy": str(Path(np.__file__).resolve()),
        "numpy_version": np.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
