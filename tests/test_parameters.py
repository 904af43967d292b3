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
    name, values = read_parameters(text, "it", DECLARED, "implementation", "--impls")
    return name, dict(values)


@pytest.mark.parametrize(("text", "words"), [
    ("it:rank=4", "no parameter 'rank'; it takes features, seed, share (--impls)"),
    ("it:features=0", "features is a whole number, 1 or more, not '0'"),
    ("it:seed=1.5", "seed is a whole number, 0 or more, not '1.5'"),
    ("it:share=nan", "share is a number, 0 to 1, not 'nan'"),
    ("it:", "features is a whole number"),
    ("it:seed=1:seed=2", "seed is given twice"),
])  # fmt: skip
def test_what_no_parameter_takes_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
