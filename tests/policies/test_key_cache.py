from dataclasses import dataclass

from draftkeep.policies.key_cache import MAX_AGE_S, KeyCache


@dataclass
class World:
    now_s: float = 1000.0
    erasures: int = 0

    def cache(self) -> KeyCache[str]:
        return KeyCache(clock=lambda: self.now_s, erasures=lambda: self.erasures)


def test_a_value_lives_a_minute_at_most_however_often_it_is_asked_for() -> None:
    world = World()
    cache = world.cache()
    cache.put("a", "key", deadline_s=1e9, mark=cache.sweep())
    for _ in range(59):
        world.now_s += 1
        assert cache.get("a") == "key"
    world.now_s = 1000.0 + MAX_AGE_S
    assert cache.get("a") is None


def test_a_deadline_comes_before_the_minute() -> None:
    world = World()
    cache = world.cache()
    cache.put("a", "key", deadline_s=1007.0, mark=cache.sweep())
    world.now_s = 1006.9
    assert cache.get("a") == "key"
    world.now_s = 1007.0
    assert cache.get("a") is None
    cache.put("b", "key", deadline_s=1007.0, mark=cache.sweep())
    assert cache.get("b") is None


def test_an_erasure_empties_it_and_a_clock_that_steps_back_too() -> None:
    world = World()
    cache = world.cache()
    cache.put("a", "key", deadline_s=1e9, mark=cache.sweep())
    world.erasures += 1
    assert cache.get("a") is None
    cache.put("a", "key", deadline_s=1e9, mark=cache.sweep())
    world.now_s -= 0.5
    assert cache.get("a") is None


def test_a_value_read_before_an_erasure_is_not_kept() -> None:
    world = World()
    cache = world.cache()
    mark = cache.sweep()
    world.erasures += 1
    cache.put("a", "old key", deadline_s=1e9, mark=mark)
    assert cache.get("a") is None
    cache.put("a", "old key", deadline_s=1e9, mark=mark)
    assert cache.get("a") is None


def test_an_older_entry_does_not_take_a_newer_one_along() -> None:
    world = World()
    cache = world.cache()
    cache.put("a", "first", deadline_s=1010.0, mark=cache.sweep())
    cache.put("a", "second", deadline_s=1e9, mark=cache.sweep())
    world.now_s = 1011.0
    assert cache.get("a") == "second"
