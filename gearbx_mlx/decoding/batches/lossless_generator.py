"""Batches in mode lossless: sequences join and leave at any step, and a step gives out several tokens of each."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch
from mlx_lm.sample_utils import greedy_sampler

from ...routing.batch_policy import highest
from ...routing.monitor import Reading
from ..random_state import OwnRandomState
from ..response import BatchGearResponse
from ..sampler import Sampler
from ..step import DRAFT
from .generator import BatchGenerator, OfOneText
from .lossless_batch import LosslessTokens, VerifiedToken
from .lossless_plans import BatchPlans
from .sequence import BatchText, SeenRow


class LosslessGenerator(BatchGenerator):
    """Writes many texts at once, each of them the one that the top gear writes of its prompt alone.

    Args:
        mode: makes the sequence of a prompt's tokens.
        plans: when to draft.
        sampler: of sequences that bring none; greedy without.
        settings: further keywords of mlx-lm's BatchGenerator.
    """

    def __init__(
        self, tokenizer: Any, mode: OfOneText, plans: BatchPlans, sampler: Sampler | None = None, **settings: Any
    ):
        gearbox = plans.gearbox
        super().__init__(gearbox.model, tokenizer, gearbox, mode, highest, sampler, **settings)
        self._shared = sampler
        self._generation_batch = LosslessTokens.drafting(plans, self._rows, self._writing, self.sequences, sampler)

    def insert_segments(self, *arguments: Any, **keywords: Any) -> list[int]:
        """As BatchGenerator's. A sequence that samples draws random numbers of its own, without a seed too."""
        uids = super().insert_segments(*arguments, **keywords)
        for uid in uids:
            text = self.sequences[uid]
            if text.random is None and (text.sampler or self._shared or greedy_sampler) is not greedy_sampler:
                text.random = OwnRandomState(np.array(mx.random.randint(0, 2**31 - 1)).item())
        return uids

    def _response(
        self, token: GenerationBatch.Response, each: BatchText, seen: SeenRow, reading: Reading
    ) -> BatchGearResponse:
        response, verified = super()._response(token, each, seen, reading), seen.seen
        near_tie = isinstance(verified, VerifiedToken) and verified.near_tie
        return replace(response, from_draft=response.source == DRAFT, near_tie=near_tie)
