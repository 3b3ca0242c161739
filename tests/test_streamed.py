"""The streaming writer of safetensors files: the library reads the same tensors back."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from umm_reflect.errors import UserError
from umm_reflect.streamed import DTYPES, Spec, write_streamed

TENSORS = {
    "odd": torch.arange(3).bfloat16(),
    "wide": torch.linspace(-1, 1, 10).reshape(2, 5),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "none": torch.zeros(0, 4),
}
SPECS = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def test_the_library_reads_what_was_written_in_any_order(tmp_path):
    for order in (list(TENSORS), list(TENSORS)[::-1]):
        path = write_streamed(tmp_path / "x.safetensors", SPECS, ((n, TENSORS[n]) for n in order))
        read = load_file(path)
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_is_cast_to_what_was_said_and_may_be_a_view(tmp_path):
    square = torch.arange(6.0).reshape(2, 3)
    specs = {"x": Spec(torch.bfloat16, (3, 2))}
    path = write_streamed(tmp_path / "x.safetensors", specs, [("x", square.T)])
    assert torch.equal(load_file(path)["x"], square.T.bfloat16())


def test_one_content_gives_one_file_whatever_the_order(tmp_path):
    names = list(TENSORS)
    files = [
        write_streamed(tmp_path / str(i), SPECS, ((n, TENSORS[n]) for n in order)).read_bytes()
        for i, order in enumerate((names, names[::-1]))
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("tensors", "line"),
    [
        ([("x", torch.ones(2))], "lacks 1 tensors, y first"),
        ([("x", torch.ones(2)), ("x", torch.ones(2))], "x is no tensor of .*, or it came twice"),
        ([("z", torch.ones(2))], "z is no tensor"),
        ([("x", torch.ones(3))], r"x is \[3\], expected \[2\]"),
    ],
)
def test_what_does_not_match_is_refused_by_name(tmp_path, tensors, line):
    specs = {"x": Spec(torch.float32, (2,)), "y": Spec(torch.float32, (2,))}
    with pytest.raises(ValueError, match=line):
        write_streamed(tmp_path / "x.safetensors", specs, tensors)


def test_a_folder_that_is_missing_is_one_line_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match=r"cannot be written \(No such file or directory\)"):
        write_streamed(tmp_path / "no" / "x.safetensors", {}, [])


def test_every_format_has_a_name_of_its_own():
    assert DTYPES["BF16"] == torch.bfloat16
    assert len(set(DTYPES)) == len(set(DTYPES.values())) == 8
