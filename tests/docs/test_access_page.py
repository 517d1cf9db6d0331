"""docs/access.md is printed from the access tables."""

from scripts.print_access_rules import PAGE, page


def test_the_page_of_access_rules_is_as_the_tables_say() -> None:
    assert PAGE.read_text("utf-8") == page(), "print it: python -m scripts.print_access_rules"
