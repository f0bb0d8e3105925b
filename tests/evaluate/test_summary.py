"""The last table: acceptance of every source, where there are several."""

from eagle31_train.summary import by_source


def report(**lengths):
    return {"by_source": {name: {"acceptance_length": length} for name, length in lengths.items()}}


def test_sources_are_told_apart_where_there_are_several():
    assert by_source(report(zh=2.3, en=3.19, agent=None)) == [("  by source", "zh: 2.300   en: 3.190   agent: -")]
    assert by_source(report(zh=2.3)) == []
    assert by_source({}) == []
