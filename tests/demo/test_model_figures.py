"""The second act's claims hold for good figures, and each can be broken."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from p2pdist.cli.verbs.demo.model.figures import Load, ModelFigures, model_claims, model_document, show_model

SIZE = 64 << 20


def good() -> ModelFigures:
    """Figures of an act in which everything went well."""
    loads = [
        Load(f"host{number}", 10.0 + number, 14.0, 0.2, "safetensors, numpy", 64, "d1", SIZE // 2, SIZE // 2)
        for number in (1, 2)
    ]
    return ModelFigures(2, 6, SIZE, 64, "d1", loads=loads, sent={"a": SIZE}, heads={"a": 1, "b": 1})


def changed(**changes: object) -> ModelFigures:
    return replace(good(), **changes)  # type: ignore[arg-type]


def test_good_figures_break_no_claim() -> None:
    assert [claim.text for claim in model_claims(good()) if not claim.held] == []
    assert good().makespan_s == 3.0


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (changed(loads=good().loads[:1]), "every host has the model's tensors"),
        (changed(loads=[replace(load, digest="d2") for load in good().loads]), "every host has the model's tensors"),
        (changed(loads=[replace(load, tensors=63) for load in good().loads]), "every host has the model's tensors"),
        (changed(sent={"a": 2 * SIZE}), "bytes that the hub sent"),
        (changed(sent={}), "bytes that the hub sent"),
        (changed(heads={"a": 1, "b": 2}), "HEADs of a file"),
        (changed(heads={}), "HEADs of a file"),
        (changed(untidy=["a process was left"]), "left behind"),
    ],
)
def test_each_claim_can_be_broken(bad: ModelFigures, text: str) -> None:
    (broken,) = [claim.text for claim in model_claims(bad) if not claim.held]
    assert broken.startswith(text)


def test_document_and_table_have_the_figures() -> None:
    document = json.loads(json.dumps(model_document(good(), model_claims(good()))))
    assert document["ok"] is True and document["hub_ratio"] == 1.0 and len(document["loads"]) == 2
    console = Console(file=io.StringIO(), width=130)
    show_model(console, good(), model_claims(good()))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "host2" in shown and "1.000 x the model" in shown and "held" in shown
