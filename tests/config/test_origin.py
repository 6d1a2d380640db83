"""Classes keep their names, wherever weights come from; names that could mean two classes count as none."""

from common.config.origin import label_names


def test_class_names_are_read_in_the_order_of_their_ids() -> None:
    assert label_names({"label_names": ["b", "a"]}) == label_names({"pretrained_cfg": {"label_names": ("b", "a")}})
    assert (
        label_names({"id2label": {"1": "a", "0": "b"}}) == label_names({"label_names": {1: "a", 0: "b"}}) == ["b", "a"]
    )
    for ambiguous in ({"classes": ["a", "a"]}, {"id2label": {"1": "a", "2": "b"}}, {}):
        assert label_names(ambiguous) == []
