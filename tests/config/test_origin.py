"""Classes keep their names, wherever weights come from; names that could mean two classes count as none."""

import pytest

from common.config.origin import Origin, get_class_names


def test_class_names_are_read_in_the_order_of_their_ids() -> None:
    assert get_class_names({"label_names": ["b", "a"]}) == get_class_names(
        {"pretrained_cfg": {"label_names": ("b", "a")}}
    )
    assert (
        get_class_names({"id2label": {"1": "a", "0": "b"}})
        == get_class_names({"label_names": {1: "a", 0: "b"}})
        == ["b", "a"]
    )
    for ambiguous in ({"classes": ["a", "a"]}, {"id2label": {"1": "a", "2": "b"}}, {}):
        assert get_class_names(ambiguous) == []


@pytest.mark.parametrize(
    "recorded, data, is_trained_on",
    [
        ("here/pets", "here/pets", True),
        ("here/pets", "here/../here/pets/", True),
        ("here/pets", "there/pets", False),
        # moved, else its training images would be evaluated
        ("/scratch/job_1/pets", "there/pets", True),
        ("/scratch/job_1/pets", "there/cars", False),
        ("owner/pets", "there/pets", False),  # a name on the Hub
        ("", "there/pets", False),
    ],
)
def test_moved_data_are_those_of_the_run(
    tmp_path, monkeypatch, recorded, data, is_trained_on
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here/pets", "there/pets", "there/cars"):
        (tmp_path / folder).mkdir(parents=True)
    origin = Origin("best", False, {}, {"data": recorded}, (), None)
    assert origin.trained_on(data) == is_trained_on
