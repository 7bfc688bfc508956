"""Pools of pages and slots: nothing is handed out twice, lost, or taken back from a stranger."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qwen35_jax.engine.id_pool import IdPool

SIZE = 12


def test_every_id_but_the_padding_s_is_handed_out_once():
    pool = IdPool("page", 6)
    assert pool.num_ids == pool.num_free == 5
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    pool.check_invariants()


def test_the_lowest_ids_come_first_and_the_latest_freed_return_in_order():
    pool = IdPool("page", 6)
    assert pool.allocate(3) == [1, 2, 3]
    pool.free([2, 1])
    assert pool.allocate(3) == [2, 1, 4]


def test_asking_for_more_than_is_free_takes_nothing():
    pool = IdPool("page", 4)
    pool.allocate(1)
    with pytest.raises(ValueError, match="3 pages asked for, 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(0) == []


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1, 1], "given back twice"), ([1, 3], "slots \\[3\\] are not taken"), ([0], "not taken")],
)
def test_ids_given_back_wrongly_are_refused_and_none_is_freed(ids: list[int], message: str):
    pool = IdPool("slot", 5)
    pool.allocate(2)
    with pytest.raises(ValueError, match=message):
        pool.free(ids)
    assert pool.taken == {1, 2}
    pool.check_invariants()


def test_freeing_twice_is_refused():
    pool = IdPool("slot", 5)
    ids = pool.allocate(2)
    pool.free(ids)
    with pytest.raises(ValueError, match="not taken"):
        pool.free(ids)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = IdPool("page", SIZE)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, SIZE))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        ids = self.pool.allocate(count)
        assert len(ids) == count
        self.owned.append(ids)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @rule(page=st.integers(-1, SIZE + 1))
    def free_what_nobody_owns(self, page: int) -> None:
        if not any(page in ids for ids in self.owned):
            with pytest.raises(ValueError, match="not taken"):
                self.pool.free([page])

    @invariant()
    def the_owners_and_the_pool_agree(self) -> None:
        self.pool.check_invariants()
        ids = [page for ids in self.owned for page in ids]
        assert len(set(ids)) == len(ids)
        assert self.pool.taken == set(ids)
        assert self.pool.num_free == SIZE - 1 - len(ids)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
