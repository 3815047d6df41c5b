"""Whether an expression is found in a text, in time linear in the text whatever the expression.

Owns the use of llguidance's automata over bytes for that. Must never know schemas.
"""

from __future__ import annotations

from collections.abc import Callable

from ceiba.core import limits
from ceiba.core.byte_vocabulary import ByteVocabulary
from ceiba.grammar.base import Refusal
from ceiba.grammar.regex import containing


def finder(pattern: str, path: str, keyword: str) -> Callable[[str], bool]:
    """A function that says whether ``pattern`` is found in a text. Raises Refusal for an expression that cannot be
    read; so does the function where the automaton grows too large."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[]),
        LLMatcher.grammar_from_regex(containing(pattern, path)),
        log_level=0,
        limits=LLParserLimits(max_lexer_states=limits.GRAMMAR_LEXER_STATES, verbose_errors=False),
    )

    def check() -> None:
        if problem := matcher.get_error():
            why = problem.strip().splitlines()[0][:300]
            raise Refusal(f"its pattern cannot be read: {why}", path=path, keyword=keyword)

    def found(text: str) -> bool:
        data = text.encode("utf-8", "replace")
        matcher.reset()
        taken = matcher.try_consume_tokens(list(data))
        check()
        return taken == len(data) and bool(matcher.is_accepting())

    check()
    return found
