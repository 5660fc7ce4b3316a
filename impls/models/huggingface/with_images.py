"""Models of text and images, of which ``text_config`` counts: a tower for images is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from spbench.impls.models.huggingface.config import Config, not_covered
from spbench.impls.models.model import Model


class WithImagesConfig(Config):
    """A derived class says whose ``text_config`` its files have."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("boi_token_index", "eoi_token_index", "image_token_index", "image_token_id", "video_token_id"),
            *("vision_config", "vision_start_token_id", "vision_end_token_id", "language_model_only"),
            *("mm_tokens_per_image", "tie_word_embeddings"),
        }
    )

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        text, family = content.get("text_config"), cls.model_fields["text_config"].annotation
        if not isinstance(text, Mapping):
            return dict(content)
        assert isinstance(family, type)
        assert issubclass(family, Config)
        if (kind := text.get("model_type", family.name)) != family.name:
            raise not_covered("text_config.model_type", kind, f"it must be {family.name}")
        own = {k: v for k, v in text.items() if k != "model_type"}
        if "tie_word_embeddings" in content and "tie_word_embeddings" in family.model_fields:
            own = {"tie_word_embeddings": content["tie_word_embeddings"]} | own
        return {**content, "text_config": own}

    def model(self) -> Model:
        text: Config = self.text_config  # type: ignore[attr-defined]
        return text.model()
