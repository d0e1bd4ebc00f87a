"""Every text and image-text class of transformers: the same tokens, or an `UnsupportedError`.

Each class runs as a tiny model, built from the defaults of its config where possible. Its tokens
must not be wrong, it must not crash, and its outcome must match the record. The full tier has one
class of each of the best-known families, the slow tier all classes.
"""

from __future__ import annotations

import pytest
import transformers

from tests.any_class import classes, entries
from tests.targets.families import FAMILIES
from tests.targets.sweep import (
    IDENTICAL,
    NOT_MADE,
    REFUSED,
    WRONG,
    counts,
    outcome,
    record,
    recorded_version,
)

CLASSES = classes()
# The first class of each family, the best-known families first.
_NAMES = dict(reversed(entries()))
_FIRST = [kinds.split()[0] for kinds in FAMILIES.values()][:40]
SAMPLE = [(kind, _NAMES[kind]) for kind in _FIRST if kind in _NAMES]
# Minimum number of identical entries, of 286 in the two mappings of transformers 5.23.
AT_LEAST = 230
IS_RECORDED = transformers.__version__ == recorded_version()


def check(kind: str, name: str) -> None:
    found = outcome(kind, name)
    assert WRONG not in (found.one, found.ragged)
    if IS_RECORDED:
        assert found == record()[name]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), SAMPLE, ids=[name for _, name in SAMPLE])
def test_one_class_of_each_family(kind: str, name: str) -> None:
    check(kind, name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_every_class(kind: str, name: str) -> None:
    check(kind, name)


def test_how_many_are_served() -> None:
    _, found = counts(record())
    assert found[IDENTICAL] >= AT_LEAST
    assert set(found) <= {IDENTICAL, REFUSED, NOT_MADE}
    assert all(each.why for each in record().values() if each.one != IDENTICAL)


@pytest.mark.skipif(not IS_RECORDED, reason="the record is of another version of transformers")
def test_the_record_is_whole() -> None:
    assert set(record()) == {name for _, name in CLASSES}


def test_every_model_type_has_one_family() -> None:
    kinds = [kind for kinds in FAMILIES.values() for kind in kinds.split()]
    assert len(kinds) == len(set(kinds))
    if IS_RECORDED:
        assert {kind for kind, _ in entries()} == set(kinds)
