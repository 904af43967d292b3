"""Parameters of what has a name, as they stand on the command line."""

import pytest

from attnbench.base.parameters import Parameter, read_parameters
from attnbench.errors import UsageError

DECLARED = {
    "features": Parameter(default=256),
    "seed": Parameter(default=0, least=0),
    "share": Parameter(default=0.5, real=True, least=0, most=1),
}


def read(text: str) -> tuple[str, dict[str, object]]:
    name, values = read_parameters(text, DECLARED, "implementation", "--impls")
    return name, dict(values)


def test_one_thing_has_one_name_however_its_parameters_are_written() -> None:
    for text in ("it:features=512:seed=0", "it:512", "it:seed=0:features=512"):
        assert read(text)[0] == "it:512"
    assert read("it:features=256:share=0.5")[0] == "it"
    assert read("it:seed=1:share=.25") == (
        "it:seed=1:share=0.25",
        {"features": 256, "seed": 1, "share": 0.25},
    )


def test_a_single_parameter_is_written_without_its_key() -> None:
    lengths = {"lengths": Parameter(many=True)}
    assert read_parameters("document:lengths=100+28", lengths, "mask", "--masks") == (
        "document:100+28",
        {"lengths": (100, 28)},
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it:rank=4", "no parameter 'rank'; it takes features, seed, share (--impls)"),
        ("it:features=0", "features is a whole number, 1 or more, not '0'"),
        ("it:seed=1.5", "seed is a whole number, 0 or more, not '1.5'"),
        ("it:share=nan", "share is a number, 0 to 1, not 'nan'"),
        ("it:", "features is a whole number"),
        ("it:seed=1:seed=2", "seed is given twice"),
    ],
)
def test_what_no_parameter_takes_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parameter_without_a_default_must_be_given() -> None:
    with pytest.raises(UsageError, match="needs its width, a whole number"):
        read_parameters("window", {"width": Parameter()}, "mask", "--masks")
