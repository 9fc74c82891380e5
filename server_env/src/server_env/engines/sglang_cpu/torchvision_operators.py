"""The operators for which torchvision registers shape functions while it is imported.

The torchvision on the package index is built for CUDA: beside a CPU build of torch its library does not load, the
operators are missing, and `import torchvision` fails with "operator torchvision::nms does not exist". SGLang imports it
for image models.

Remove when SGLang starts without torchvision, or when the lock of `server-sglang` for CPU holds a build of torchvision
for CPU.
"""

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def declare() -> None:
    """Declare them, without an implementation: text models never call them."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    _kept.append(library)


_kept: list[object] = []
"""Operators live as long as the library object that declared them."""
