"""Whether a model's spec can be true of any model. Of its own run's, the workers find out."""

from __future__ import annotations

from collections.abc import Iterator

from liver_hpc.layout.tensors import ModelSpec


def contradictions(spec: ModelSpec) -> Iterator[str]:
    """What a spec says against itself, by the names of tensors: marks by which copies are compared
    and buckets are laid out, and what the tables of stages and homes say."""
    tensors = range(len(spec.tensors))
    for key, stages in spec.stages.items():
        held: list[set[int]] = [set() for _ in tensors]
        for stage, chunks in enumerate(stages):
            for index in (index for chunk in chunks for index in chunk):
                if index not in tensors:
                    yield f"{key}: stage {stage} holds tensor {index} of {len(tensors)}"
                else:
                    held[index].add(stage)
        for tensor, copies in zip(spec.tensors, held, strict=True):
            if not copies:
                yield f"{tensor.name}: no stage of {key} holds it"
            elif len(copies) > 1 and not tensor.tied:
                yield f"{tensor.name}: stages {sorted(copies)} of {key} hold it, but it is not tied"
    for ep, homes in spec.homes.items():
        if len(homes) != len(tensors):
            yield f"ep{ep}: there are homes for {len(homes)} tensors, of {len(tensors)}"
            continue
        for tensor, home in zip(spec.tensors, homes, strict=True):
            if home is not None and not tensor.expert:
                yield f"{tensor.name}: rank {home} of ep{ep} holds it alone, but it is no expert's"
            if home is not None and home not in range(ep):
                yield f"{tensor.name}: its home is rank {home} of ep{ep}"
