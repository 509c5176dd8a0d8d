"""The best set of whole GPUs, compared with that which is found by trying every set."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from topologies import Node, best, indices, nodes, reference_choice, reference_score

from _nvplug.placement import Plan, preferred


def questions(node: Node) -> st.SearchStrategy[tuple[list[int], list[int], int]]:
    """What is available, what of it is required, and how many are wanted."""
    everyone = range(len(node.gpus))

    def with_available(available: list[int]) -> st.SearchStrategy[tuple[list[int], list[int], int]]:
        def with_required(required: list[int]) -> st.SearchStrategy[tuple[list[int], list[int], int]]:
            sizes = st.integers(max(1, len(required)), len(available))
            return st.tuples(st.just(available), st.just(required), sizes)

        return st.lists(st.sampled_from(available), unique=True, max_size=2).flatmap(with_required)

    return st.lists(st.sampled_from(everyone), unique=True, min_size=1).flatmap(with_available)


@given(nodes(), st.data())
def test_the_choice_is_the_best(node: Node, data: st.DataObject) -> None:
    """On any node, odd ones included, whatever is available, required and wanted."""
    available, required, size = data.draw(questions(node))
    answer = preferred(node.resource, node.ids(available), node.ids(required), size, node.plan())

    assert indices(node, answer) == best(node, available, required, size)


@settings(max_examples=settings().max_examples // 2)
@given(nodes(12), st.data())
def test_without_a_table_the_choice_is_whole(node: Node, data: st.DataObject) -> None:
    """A search, in place of a table that is not ready, gives what is asked for, and the best single GPU or pair."""
    available, required, size = data.draw(questions(node))
    plan = Plan(node.plan().layout)
    answer = indices(node, preferred(node.resource, node.ids(available), node.ids(required), size, plan))

    assert len(answer) == size
    assert {*required} <= {*answer} <= {*available}
    if size <= 2:
        rivals = [each for each in combinations(sorted(available), size) if {*each} >= {*required}]
        assert node.bandwidth(answer) == max(map(node.bandwidth, rivals))


@settings(deadline=None)
@given(nodes(), st.data())
def test_the_choice_is_always_the_same(node: Node, data: st.DataObject) -> None:
    """The kubelet asks in the order of a Go map; with and without a table, the order is irrelevant."""
    available, required, size = data.draw(questions(node))
    shuffled = data.draw(st.permutations(available))
    ready = node.plan()

    for plan in (ready, Plan(ready.layout)):
        first = preferred(node.resource, node.ids(available), node.ids(required), size, plan)
        again = preferred(node.resource, node.ids(shuffled), node.ids(required), size, plan)
        assert again == first


@settings(deadline=None)
@given(nodes(6, plain=True), st.data())
def test_the_choice_is_never_worse_than_the_references(node: Node, data: st.DataObject) -> None:
    """Without NVSwitches no set is better by the score of NVIDIA's plugin, and so not that plugin's choice."""
    available, required, size = data.draw(questions(node))
    answer = indices(node, preferred(node.resource, node.ids(available), node.ids(required), size, node.plan()))
    ours = reference_score(node, answer)

    assert ours >= reference_score(node, reference_choice(node, sorted(available), required, size))
    rivals = (each for each in combinations(sorted(available), size) if {*each} >= {*required})
    assert ours == max(reference_score(node, each) for each in rivals)


@settings(deadline=None)
@given(nodes(), st.data())
def test_what_is_broken_is_taken_last(node: Node, data: st.DataObject) -> None:
    """The kubelet may call available what has just broken: the best of the others is given, as far as that goes."""
    available, _, size = data.draw(questions(node))
    broken = data.draw(st.sets(st.sampled_from(range(len(node.gpus)))))
    devices = (replace(device, trouble="XID 79" * (device.gpu.index in broken)) for device in node.resource.devices)
    resource = replace(node.resource, devices=tuple(devices))
    answer = indices(node, preferred(resource, node.ids(available), [], size, node.plan()))
    well = [each for each in available if each not in broken]

    assert len(answer) == size
    assert {*answer} <= {*available}
    if len(well) <= size:
        assert {*answer} >= {*well}
    else:
        assert {*answer} <= {*well}
        assert node.bandwidth(answer) == node.bandwidth(best(node, well, [], size))
