import random

from conformance.conform.distinct import KEPT, Distinct, fingerprint


def of(numbers: list[int]) -> Distinct:
    """A set of so many things."""
    distinct = Distinct()
    for number in numbers:
        distinct.add(fingerprint([str(number)]))
    return distinct


def test_few_are_counted_exactly() -> None:
    """Up to the bound, the count is exact, however often each is seen."""
    assert of([*range(3000), *range(2000)]).told() == "3,000"


def test_many_are_estimated() -> None:
    """Beyond the bound, memory stays bounded and the count is right to two per cent."""
    distinct = of(list(range(5 * KEPT)))
    told = distinct.told()
    assert told.startswith("about ")
    assert abs(int(told.removeprefix("about ").replace(",", "")) - 5 * KEPT) < 0.02 * 5 * KEPT
    assert len(distinct.hashes) == KEPT


def test_order_and_split_make_no_difference() -> None:
    """Parts merged in any order, written and read in between, give the same set."""
    numbers = list(range(2 * KEPT + 7))
    whole = of(numbers)
    random.Random(0).shuffle(numbers)
    first, second = of(numbers[:1000]), of(numbers[1000:])
    second.merge(Distinct.from_json(first.to_json()))
    assert second.to_json() == whole.to_json()


def test_fingerprint_tells_words_apart() -> None:
    """Words in another order, or cut elsewhere, are another fingerprint."""
    assert len({fingerprint(words) for words in (["a", "b"], ["b", "a"], ["ab"], ["a b"])}) == 4
