"""Hugging Face transformers: eager `generate`, left-padded batches, assisted generation at one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from loadtest.peers.inside import protocol
else:
    import protocol

PAD = 0


class StepTimes(transformers.StoppingCriteria):
    """Stops nothing: `generate` asks it after every step, and the clock notes how far it is."""

    def __init__(self, clock: protocol.WaveClock, prompt_len: int) -> None:
        self._clock = clock
        self._prompt_len = prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Notes the step; `input_ids` are [batch, tokens so far]."""
        self._clock.note([input_ids.shape[1] - self._prompt_len] * input_ids.shape[0])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers:
    """Target and, for a draft length, assistant in bf16."""

    def __init__(self, job: protocol.Job) -> None:
        torch.set_num_threads(len(job.cores))
        self._target = _load(job.target)
        self._settings: dict[str, Any] = {}
        if job.draft_length is not None:
            assistant = _load(job.draft)
            assistant.generation_config.num_assistant_tokens = job.draft_length
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            self._settings["assistant_model"] = assistant

    def about(self) -> protocol.About:
        """Version and precision."""
        return protocol.About(version=transformers.__version__, precision="bf16")

    def run(self, prompts: protocol.TokenIds, max_new_tokens: int) -> protocol.Wave:
        """One padded batch."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = protocol.WaveClock(len(prompts), max_new_tokens)
        with torch.inference_mode():
            out = self._target.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                stopping_criteria=transformers.StoppingCriteriaList([StepTimes(clock, width)]),
                **self._settings,
            )
        return clock.wave([row[width : width + max_new_tokens] for row in out.tolist()])

    def close(self) -> None:
        """Nothing to stop."""


def _load(path: str) -> Any:
    """A model that never ends a text by itself."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


if __name__ == "__main__":
    protocol.serve(Transformers)
