"""docs/configuration.md is what the fields say."""

from __future__ import annotations

from pathlib import Path

from headrace.config.aliases import IGNORED, REFUSED, RENAMED, TRANSLATED
from headrace.config.fields import TrainConfig
from headrace.config.reference import fields_by_group, markdown, type_text


def test_the_page_is_not_stale() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == markdown(), (
        "run: python -m headrace.config.reference docs/configuration.md"
    )


def test_every_setting_has_help_and_a_group() -> None:
    fields = {name: f for group in fields_by_group().values() for name, f in group.items()}
    assert set(fields) == set(TrainConfig.model_fields)
    assert all(field.description and field.description.endswith(".") for field in fields.values())


def test_names_of_other_tools_lead_to_settings_and_are_in_one_table_each() -> None:
    assert set(RENAMED.values()) <= set(TrainConfig.model_fields)
    tables = [set(RENAMED), set(TRANSLATED), set(IGNORED), set(REFUSED)]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert not set(names) & set(TrainConfig.model_fields)


def test_types_as_words() -> None:
    assert type_text(int | None) == "int or none"
    assert type_text(tuple[str, ...]) == "list of text"
