"""Where actors go follows from the nodes: to others first, and never onto the CPU of a rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fastdata.ext.ray.cluster import (
    Node,
    Training,
    most_under_way,
    place,
    placed,
    placed_by_user,
    share_of_rank,
)

CPU, ALONE = {"CPU": 1.0}, Training()


def node(cpus: float, free: float | None = None, own: bool = False, **has: float) -> Node:
    return Node(
        id=f"{cpus}-{own}",
        is_own=own,
        has={"CPU": cpus, **has},
        free_cpus=cpus if free is None else free,
        store_bytes=2**30,
    )


def placed_on(nodes, missing, training=ALONE, needs=CPU, **how):
    places = place(nodes, missing=missing, needs=needs, training=training, **how)
    return {where: places.count(where) for where in sorted(set(places))}


@pytest.mark.parametrize(
    ("nodes", "missing", "expected"),
    [
        ([node(8, own=True), node(4), node(2)], 6, {"elsewhere": 6}),
        ([node(8, own=True), node(4), node(2)], 9, {"elsewhere": 6, "here": 3}),
        ([node(4, own=True), node(2)], 9, {"elsewhere": 2 + 4, "here": 3}),  # four wait
        ([node(4, own=True), node(2, free=0)], 2, {"here": 2}),
        ([node(4, free=1, own=True), node(2, free=1)], 2, {"elsewhere": 2}),  # one waits
        ([node(1, own=True)], 1, {"here": 1}),
        ([node(1, own=True), node(1)], 2, {"elsewhere": 2}),
        ([node(0, own=True), node(2)], 2, {"elsewhere": 2}),
    ],
)
def test_other_nodes_come_first_and_a_cpu_is_left_for_the_training(nodes, missing, expected):
    assert placed_on(nodes, missing) == expected


def test_a_training_that_holds_cpus_in_ray_keeps_those_and_no_more():
    held = Training(held_cpus=2)
    assert placed_on([node(6, free=4, own=True)], 6, held) == {"here": 4, "elsewhere": 2}
    two = Training(ranks=2, ranks_here=2, held_cpus=1)
    assert placed_on([node(6, free=4, own=True)], 6, two) == {"here": 2}


def test_where_the_user_says_where_only_the_share_of_a_rank_bounds_it():
    nodes = [node(4, own=True), node(4, reads=6.0)]
    how = {"needs": {"CPU": 1.0, "reads": 1.0}, "by_user": True}
    assert placed_on(nodes, 9, **how) == {"options": 9}
    assert placed_on(nodes, 9, Training(ranks=2, ranks_here=2), **how) == {"options": 2}
    assert placed_by_user({"resources": {"reads": 1}, "num_cpus": 1})
    assert not placed_by_user({"num_cpus": 1, "runtime_env": {}})
    assert placed({"label_selector": {"a": "b"}}, "options", nodes, "x") == {
        "label_selector": {"a": "b"}
    }


def test_what_other_loaders_of_the_program_hold_is_shared_with_them():
    nodes = [node(1, own=True), node(2, free=0), node(2, free=1)]
    assert placed_on(nodes, 3, others=True, held=3) == {"elsewhere": 1, "shared": 2}
    options = placed({"num_cpus": 1}, "shared", nodes, "me")
    assert options == {"num_cpus": 0, "label_selector": {"ray.io/node-id": "!me"}}
    options = placed({"num_cpus": 1}, "shared", nodes[:1], "me")
    assert options == {"num_cpus": 0, "label_selector": {"ray.io/node-id": "me"}}


@given(
    here=st.integers(0, 9),
    far=st.lists(st.integers(0, 9), max_size=4),
    ranks=st.integers(2, 6),
    wanted=st.integers(1, 12),
    each=st.sampled_from([0.5, 1.0, 2.0]),
    held=st.sampled_from([0.0, 1.0]),
)
def test_ranks_that_come_one_after_the_other_all_get_actors_and_the_same_number(
    here, far, ranks, wanted, each, held
):
    training, needs = Training(ranks=ranks, ranks_here=ranks, held_cpus=held), {"CPU": each}
    free = [max(0.0, here - ranks * held), *map(float, far)]
    got = []
    for _ in range(ranks):
        total = [float(here), *map(float, far)]
        nodes = [
            node(all_cpus, free_cpus, own=at == 0)
            for at, (all_cpus, free_cpus) in enumerate(zip(total, free, strict=True))
        ]
        places = place(nodes, missing=wanted, needs=needs, training=training, first=True)
        got.append(len(places))
        assert places == ["shared"] or "shared" not in places
        for where in places:
            if where != "shared":  # each finds a CPU, none waits for those of another rank
                at = 0 if where == "here" else next(i for i in range(1, 9) if free[i] >= each)
                free[at] -= each
                assert free[at] >= 0
    assert min(got) >= 1
    assert len(set(got)) == 1
    share = share_of_rank(nodes, needs, training)
    assert got[0] == max(1, min(share, wanted))
    if not held:  # what each rank keeps is still there
        assert free[0] >= min(here, ranks)


@given(store=st.integers(1, 2**34), batch=st.integers(1, 2**30), sharers=st.integers(1, 16))
def test_batches_under_way_take_a_quarter_of_the_store_or_two_its_half_or_there_is_one(
    store, batch, sharers
):
    most = most_under_way(store, batch, sharers)
    taken = most * batch * sharers
    assert most == 1 or taken <= store / 4 or (most == 2 and taken <= store / 2)
    assert most == 1 or math.inf > most >= 1
    assert most_under_way(store, 0, sharers) >= most
