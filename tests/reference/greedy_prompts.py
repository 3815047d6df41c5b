"""The 50 prompts of the greedy reference. Owns text only; must never import the engine or a tokenizer.

Chat prompts are written out in ChatML, so that the reference depends on no template code. The long ones share their
opening on purpose: prefix reuse is tested with the same data.
"""

from __future__ import annotations

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_RIVER = (
    "The river rises in the hills above the old mining town and runs for ninety miles before it meets the sea. In "
    "spring, when the snow melts, the water is brown and fast, and the fields on the eastern bank are often flooded "
    "for weeks. Farmers there learned long ago to plant late and to build their barns on mounds of earth. The western "
    "bank is higher and drier; its villages are joined by a road that the Romans laid, and beside the road stand the "
    "mills that once ground all the grain of the valley. "
)
_MILLS = (
    "There were eleven mills in 1780. Each had a wheel of oak, a pair of stones cut from the quarry at Harrow Edge, "
    "and a family that had kept it for generations. The miller took one sack in sixteen as his toll. When the railway "
    "came in 1846 it brought cheap flour from the port, and within twenty years eight of the mills had closed. Two "
    "were turned into weaving sheds, and one, at Long Ford, became the first electric power station of the county: a "
    "small turbine, forty lamps, and a crowd that came on foot from as far as Sallow Bridge to see them lit. "
)
_FLOOD = (
    "The great flood of 1912 carried away both bridges and the lower half of Long Ford. Nobody drowned, because the "
    "bell ringer of Saint Anne had seen the water rise at midnight and rang until dawn; but four hundred people lost "
    "their homes, and the power station was buried under two metres of gravel. The council met in the schoolroom and "
    "voted, by nine to four, to build a dam at the head of the valley. It took eleven years and three contractors. "
    "When it was finished the reservoir covered the mining town, whose people had been moved to new houses on the "
    "western bank, and the river below it never flooded so badly again. "
)
_TODAY = (
    "Today the valley lives from walkers and from a factory that makes bearings for wind turbines. The road of the "
    "Romans is a cycle path. The last working mill grinds flour on Saturdays, for visitors, with a wheel that was "
    "rebuilt in 1998 from the drawings of a schoolteacher who had measured the old one as a boy. The salmon, which "
    "had vanished when the dam was closed, came back after a ladder of forty pools was cut beside it, and in October "
    "people stand on the bridge at Sallow to count them. "
)
_CODE = '''import heapq
from dataclasses import dataclass, field


@dataclass(order=True)
class Job:
    due: float
    name: str = field(compare=False)
    period: float = field(compare=False, default=0.0)


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time runs forward")
        self.now += seconds


class Scheduler:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.heap: list[Job] = []

    def add(self, name: str, delay: float, period: float = 0.0) -> None:
        heapq.heappush(self.heap, Job(self.clock.now + delay, name, period))

    def run_until(self, end: float) -> list[tuple[float, str]]:
        log = []
        while self.heap and self.heap[0].due <= end:
            job = heapq.heappop(self.heap)
            self.clock.advance(job.due - self.clock.now)
            log.append((self.clock.now, job.name))
            if job.period:
                heapq.heappush(self.heap, Job(job.due + job.period, job.name, job.period))
        return log

'''


def chat(user: str, system: str = SYSTEM) -> str:
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def dialogue(*turns: str, system: str = SYSTEM) -> str:
    """Turns alternate user, assistant, user, …; the last one is the user's."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n"
    for i, turn in enumerate(turns):
        text += f"<|im_start|>{'assistant' if i % 2 else 'user'}\n{turn}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


PROMPTS: list[tuple[str, str]] = [
    ("chat-capital", chat("What is the capital of France?")),
    ("chat-rainbow", chat("Why does a rainbow form? Explain it to a child in three sentences.")),
    ("chat-poem", chat("Write a short poem about a lighthouse in winter.")),
    ("chat-email", chat("Write a polite email asking my landlord to repair the heating before Friday.")),
    ("chat-recipe", chat("Give me a recipe for pancakes with exact amounts for four people.")),
    ("chat-pirate", chat("How do I boil an egg?", "You are a pirate. Answer every question in pirate speech.")),
    ("chat-terse", chat("Name the largest planet of the solar system.", "Answer with one word.")),
    ("chat-empty", chat("")),
    ("chat-emoji", chat("Translate into emoji: the cat sleeps on the warm roof 🐈🏠☀️")),
    ("chat-json", chat('Return a JSON object with the keys "name", "age" and "city" for a made-up person.')),
    ("chat-list", chat("List ten European capitals, one per line, numbered.")),
    ("chat-compare", chat("What is the difference between a process and a thread? Use a table.")),
    ("chat-story", chat("Tell me a story about a robot who learns to paint. Begin with 'It was raining'.")),
    ("chat-refuse", chat("Can you tell me tomorrow's lottery numbers?")),
    ("chat-turns", dialogue("My name is Ines and I live in Porto.", "Nice to meet you, Ines!", "Where do I live?")),
    (
        "chat-turns-maths",
        dialogue("What is 12 times 12?", "12 times 12 is 144.", "And half of that?", "Half of 144 is 72.", "Add 8."),
    ),
    ("maths-sum", chat("What is 17 + 28? Show each step.")),
    ("maths-word", chat("A train travels 180 km in 2 hours and 15 minutes. What is its average speed?")),
    ("maths-equation", "Solve for x: 3x + 7 = 22.\n\nSubtract 7 from both sides:"),
    ("maths-sequence", "1, 1, 2, 3, 5, 8, 13, 21,"),
    ("maths-primes", "The prime numbers below 50 are 2, 3, 5, 7,"),
    ("maths-table", "| n | n^2 | n^3 |\n|---|---|---|\n| 1 | 1 | 1 |\n| 2 | 4 | 8 |\n| 3 |"),
    ("code-fib", "def fibonacci(n):\n    "),
    ("code-chat", chat("Write a Python function that checks whether a string is a palindrome.")),
    ("code-sql", "-- the ten customers with the highest total in 2024\nSELECT"),
    ("code-html", '<!DOCTYPE html>\n<html lang="en">\n<head>\n  <meta charset="utf-8">\n  <title>'),
    ("code-c", "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"),
    ("code-json", '{"users": [{"id": 1, "name": "Alice", "roles": ["admin"]}, {"id": 2, "name":'),
    ("code-bash", "#!/bin/sh\n# count the lines of every .txt file under the current directory\n"),
    ("code-bug", chat("What is wrong with this code?\n\n```python\nfor i in range(10)\n    print(i\n```")),
    ("lang-french", "Il était une fois, dans un petit village au bord de la mer,"),
    ("lang-german", chat("Wie heißt die Hauptstadt von Österreich?")),
    ("lang-spanish", "El perro corre por la calle y"),
    ("lang-chinese", "今天天气很好，我们去"),
    ("lang-japanese", chat("日本の首都はどこですか。")),
    ("lang-russian", "Москва — столица"),
    ("lang-arabic", "مرحبا، كيف"),
    ("lang-hindi", "भारत की राजधानी"),
    ("short-the", "The"),
    ("short-newline", "\n"),
    ("short-digit", "7"),
    ("short-hello", "Hello, world!"),
    ("text-wiki", "The Roman Empire was the state that"),
    ("text-spaces", "Column A      Column B      Column C\n1             2             "),
    ("text-repeat", "one two three one two three one two three one two"),
    ("long-river", _RIVER + _MILLS + "In short,"),
    ("long-flood", _RIVER + _MILLS + _FLOOD + "Many years later,"),
    ("long-question", chat(_RIVER + _MILLS + _FLOOD + "\n\nWhy did nobody drown in the flood of 1912?")),
    ("long-summary", chat(_RIVER + _MILLS + _FLOOD + _TODAY + "\n\nSummarise the text in two sentences.")),
    ("long-code", _CODE + _CODE.replace("Job", "Task").replace("Clock", "Timer") + "if __name__ == '__main__':\n"),
]
