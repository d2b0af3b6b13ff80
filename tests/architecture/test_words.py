"""The documents stay short, and their sentences are read once."""

from __future__ import annotations

import pytest

from tests.architecture.repository import ROOT
from tools.house.documents import Document, read_documents

MOST_WORDS = 33_500  # of all documents together
MOST_WORDS_OF_THE_FIRST_PAGE = 2_500  # ARCHITECTURE.md
MOST_WORDS_OF_A_SENTENCE = 45
DOCUMENTS = {str(document.path): document for document in read_documents(ROOT)}


def test_the_documents_together_are_short() -> None:
    words = {name: document.num_words for name, document in DOCUMENTS.items()}
    assert sum(words.values()) <= MOST_WORDS, f"cut something older for what is new: {words}"


def test_the_first_page_is_short() -> None:
    assert DOCUMENTS["ARCHITECTURE.md"].num_words <= MOST_WORDS_OF_THE_FIRST_PAGE


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_sentences_are_read_once(document: Document) -> None:
    long = [text for text in document.sentences() if len(text.split()) > MOST_WORDS_OF_A_SENTENCE]
    assert long == []
