"""Texts that ship: written for this package, under its licence."""

# Easy for the model that ships, which learned from worked sums.
EASY = (
    "Question: Tom has 5 apples and buys 7 more. He gives 3 to his sister. How many apples does he have?\n"
    "Answer: Tom has 5 + 7 = <<5+7=12>>12 apples.\nHe has 12 - 3 = <<12-3=9>>9 apples left.\n#### 9\n\n"
    "Question: A pen costs 4 dollars. How much do 6 pens cost?\n"
    "Answer: The pens cost 6 * 4 = $<<6*4=24>>24.\n#### 24\n"
)
HARD = (
    "Quarterly turbine audits exposed zinc fatigue; Ngozi blamed humid valves, not Lisbon's ledger. Why purple "
    "algebra hums beneath frozen kiosks remains, per clause 9b, unsettled: 47 lynx, 3.2 ohms, velvet, Kyoto, brine. "
    "Xylophones audit dusk; guava tariffs pivot; syntax molts."
)
CHAT = (
    "Good morning! How are you today? I am very well, thank you. What would you like to do? I would like to go for a "
    "walk in the garden. That is a good idea. The sun is shining, and it is warm. Shall we take the dog with us? Yes, "
    "he will like that very much. Then we can go to the shop and buy some bread. Thank you, you are very kind."
)
MATHEMATICS = (
    "Tom has 5 apples and buys 7 more. He gives 3 to his sister. How many apples does he have? He has 5 + 7 = 12 "
    "apples. He gives away 3, so he has 12 - 3 = 9 apples left. A pen costs 4 dollars. What do 6 pens cost? They cost "
    "6 * 4 = 24 dollars. If 2x + 6 = 20, then 2x = 20 - 6 = 14 and x = 14 / 2 = 7."
)
CODE = (
    "def largest(values):\n    best = values[0]\n    for value in values[1:]:\n        if value > best:\n"
    "            best = value\n    return best\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n"
    "        return self.items.pop()\n"
)


def halves(text: str) -> list[str]:
    """The text in two parts, cut at a space."""
    middle = text.index(" ", len(text) // 2)
    return [text[:middle], text[middle:]]


MIXED = "\n".join(part for parts in zip(halves(CHAT), halves(MATHEMATICS), halves(CODE)) for part in parts)
WORKLOADS = {"chat": CHAT, "mathematics": MATHEMATICS, "code": CODE, "mixed": MIXED}
