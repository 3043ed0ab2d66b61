"""Rules 2 and 3: cases W1 to W11, both orders, late publication and late sightings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.window import VersionWindow, WindowOrder


def seen(keep: int, *labels: str, order: WindowOrder = "published") -> VersionWindow:
    window = VersionWindow(keep, order)
    for label in labels:
        window.observe([label])
    return window


def test_w1_off_keeps_everything() -> None:
    window = seen(0, "a", "b", "c", "d")
    assert not window.judge(["a"]).stale
    assert window.cutoff_index == 0


@pytest.mark.parametrize("keep", [-1, "2", 1.5, None, True])
def test_w2_anything_but_a_whole_number_is_a_configuration_error(keep: Any) -> None:
    with pytest.raises(ConfigError):
        VersionWindow(keep)


def test_another_order_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError):
        VersionWindow(1, "alphabetic")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["published", "observed"])
def test_w5_without_a_real_version_the_window_is_empty_and_drops_nothing(order: WindowOrder) -> None:
    window = seen(1, "", "unknown", "-1", "None", order=order)
    facts = window.judge(["unknown", "", "-1"])
    assert (window.labels, facts.stale, facts.current_index, facts.cutoff_index, facts.gaps) == (
        [],
        False,
        -1,
        0,
        (),
    )
    assert facts.gap_mean == 0.0


@pytest.mark.parametrize("order", ["published", "observed"])
def test_w7_the_order_is_that_of_first_sight_not_of_the_alphabet(order: WindowOrder) -> None:
    window = seen(1, "alpha", "aardvark", order=order)
    assert window.labels == ["alpha", "aardvark"]
    assert window.judge(["alpha"]).stale
    assert not window.judge(["aardvark"]).stale


def test_w8_any_stale_trajectory_makes_the_group_stale() -> None:
    window = seen(1, "old", "new")
    assert window.judge(["", "old"]).stale
    assert window.judge(["new", "old"]).stale
    assert not window.judge(["", "new"]).stale


def test_w10_gaps_are_over_trajectories() -> None:
    facts = seen(3, "middle", "new").judge(["middle", "new"])
    assert (facts.stale, facts.current_index, facts.cutoff_index) == (False, 1, 0)
    assert (min(facts.gaps), max(facts.gaps), facts.gap_mean) == (0, 1, 0.5)


def test_w11_the_cutoff_is_the_oldest_of_the_last_n() -> None:
    window = seen(2, "a", "b", "c", "d")
    assert window.labels[window.cutoff_index] == "c"
    assert [window.judge([label]).stale for label in "abcd"] == [True, True, False, False]


@pytest.mark.parametrize(
    ("keep", "count", "cutoff"), [(1, 1, 0), (1, 2, 1), (2, 1, 0), (2, 2, 0), (2, 3, 1), (5, 3, 0)]
)
def test_cutoff_index(keep: int, count: int, cutoff: int) -> None:
    assert seen(keep, *[f"v{n}" for n in range(count)]).cutoff_index == cutoff


def test_labels_are_stripped_everywhere() -> None:
    window = VersionWindow(1)
    window.publish(" v1 ")
    assert not window.observe(["v1\n"])
    assert window.labels == ["v1"]
    assert window.index("  v1") == 0


def test_a_published_version_is_current_before_any_group_of_it_completed() -> None:
    window = seen(1, "v1")
    assert window.publish("v2")
    assert window.judge(["v1"]).stale
    assert not window.observe(["v2"])


def test_in_the_observed_order_a_publication_moves_nothing() -> None:
    window = seen(1, "v1", order="observed")
    assert not window.publish("v2")
    assert not window.judge(["v1"]).stale
    assert window.observe(["v2"])
    assert window.judge(["v1"]).stale


def test_only_the_first_publication_counts() -> None:
    window = VersionWindow(2)
    assert [window.publish(label) for label in ("v1", "v2", "v1", "v2")] == [True, True, False, False]
    assert window.labels == ["v1", "v2"]


def test_a_late_publication_moves_the_label_to_its_published_place() -> None:
    """Observed before it was published: it takes the place of its publication, and others are judged by it."""
    window = VersionWindow(1)
    window.publish("v1")
    window.observe(["x"])
    window.publish("v2")
    assert window.labels == ["v1", "x", "v2"]
    assert window.publish("x")
    assert window.labels == ["v1", "v2", "x"]
    assert window.judge(["v2"]).stale
    assert not window.judge(["x"]).stale


def test_publishing_what_is_newest_already_does_not_advance() -> None:
    window = seen(1, "v1", "v2")
    assert not window.publish("v2")
    assert window.labels == ["v1", "v2"]


def test_a_late_sighting_is_counted_in_both_orders_and_is_newest_only_in_the_plain_one() -> None:
    places: dict[WindowOrder, int | None] = {}
    orders: tuple[WindowOrder, ...] = ("published", "observed")
    for order in orders:
        window = VersionWindow(1, order)
        window.publish("v1")
        window.publish("v2")
        window.observe(["v2"])
        window.observe(["v1"])
        window.observe(["v1"])
        assert window.late_sightings == 1
        places[order] = window.index("v1")
    assert places == {"published": 0, "observed": 1}


def test_sightings_in_published_order_are_not_late() -> None:
    window = VersionWindow(1)
    for label in ("v1", "v2", "v3"):
        window.publish(label)
        window.observe([label])
    assert window.late_sightings == 0


_STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", "c", "d", "unknown"])), max_size=20)


@given(_STEPS, st.integers(0, 3), st.sampled_from(["published", "observed"]))
def test_places_are_those_of_the_order_and_a_copy_by_bytes_is_the_same_window(
    steps: list[tuple[bool, str]], keep: int, order: WindowOrder
) -> None:
    window = VersionWindow(keep, order)
    for is_publication, label in steps:
        before = list(window.labels)
        advanced = window.publish(label) if is_publication else window.observe([label])
        assert advanced == (window.labels != before)
    assert [window.index(label) for label in window.labels] == list(range(len(window.labels)))
    assert len(set(window.labels)) == len(window.labels)
    raw = msgspec.msgpack.encode(window)
    assert msgspec.msgpack.decode(raw, type=VersionWindow) == window


@given(_STEPS)
def test_published_labels_stand_in_published_order(steps: list[tuple[bool, str]]) -> None:
    window = VersionWindow(2)
    publications: list[str] = []
    for is_publication, label in steps:
        if is_publication:
            window.publish(label)
            if label != "unknown" and label not in publications:
                publications.append(label)
        else:
            window.observe([label])
    assert [label for label in window.labels if label in publications] == publications
