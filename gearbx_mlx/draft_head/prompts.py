"""Bundled prompts of several kinds: templates, filled with topics. They are the same in every run.

The text is this project's own. A head learns the model's answers, so prompts only need to lead to varied ones.
"""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from math import lcm

COUNT = 2000  # bundled prompts

NAMES = (
    *("Ana", "Ben", "Chloe", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Maya"),
    *("Nora", "Omar", "Paula", "Quinn", "Rosa", "Samir", "Tara", "Uma", "Victor", "Wendy", "Yusuf", "Zoe"),
)
THINGS = (
    *("apples", "books", "pencils", "marbles", "tickets", "cookies", "stickers", "eggs", "shirts", "toy cars"),
    *("flowers", "bottles", "oranges", "postcards", "candles", "muffins", "stamps", "balloons", "notebooks"),
)
FUNCTIONS = (
    *("reverses a string", "checks whether a number is prime", "merges two sorted lists", "counts words in a text"),
    *("removes duplicates from a list", "finds the longest word in a sentence", "computes the n-th Fibonacci number"),
    *("flattens a nested list", "validates an email address", "converts a number to Roman numerals"),
    *("finds the two largest values in a list", "rotates a matrix by 90 degrees", "parses a CSV line"),
    *("checks whether brackets are balanced", "groups words by their first letter", "sorts dictionaries by a key"),
    *("computes the greatest common divisor", "counts vowels", "finds all anagrams of a word in a list"),
    *("transposes a matrix", "performs a binary search", "computes a moving average", "formats seconds as hh:mm:ss"),
    *(
        "reads a file and returns its longest line",
        "checks whether a word is a palindrome",
        "compresses runs of letters",
    ),
    *("splits a list into chunks of a given size", "finds the median of a list", "counts files in a directory"),
    *("converts Celsius to Fahrenheit", "shuffles a deck of cards", "sums the digits of a number"),
    *("retries a request three times", "caches the results of another function", "draws a triangle of stars"),
    *("finds the first repeated character", "adds two binary numbers", "evaluates a simple arithmetic expression"),
    *("computes the distance between two points", "simulates rolling two dice", "replaces tabs with spaces"),
)
LANGUAGES = ("Python", "JavaScript", "Python", "Go", "Java", "Python", "Rust", "C++", "TypeScript", "Python", "C#")
SUBJECTS = (
    *("photosynthesis", "the water cycle", "black holes", "inflation", "vaccines", "the French Revolution", "gravity"),
    *("plate tectonics", "machine learning", "the printing press", "volcanoes", "electric cars", "the human heart"),
    *("the Roman Empire", "solar panels", "chess", "jazz music", "honey bees", "the moon landing", "coral reefs"),
    *("recycling", "DNA", "the internet", "coffee", "penguins", "bicycles", "rainbows", "dreams", "antibiotics"),
    *("the stock market", "earthquakes", "bread", "the Great Wall of China", "sound waves", "migration of birds"),
    *("blockchain", "sleep", "the periodic table", "democracy", "glaciers", "robots", "tea", "yoga", "dinosaurs"),
    *("batteries", "the Olympic Games", "poetry", "climate change", "cheese", "libraries", "submarines", "the brain"),
)
GOALS = (
    *("learn a new language", "sleep better", "save money", "start running", "prepare for a job interview"),
    *("plan a weekend in the mountains", "cook for six guests", "grow tomatoes on a balcony", "read more books"),
    *("write a good resume", "organize a small office", "learn to play the guitar", "make new friends in a city"),
    *("reduce screen time", "train a puppy", "pack for a long trip", "choose a laptop", "speak in public"),
    *("fix a flat bicycle tire", "start a blog", "study for an exam", "clean a kitchen", "bake bread", "meditate"),
    *("use less electricity", "move to another country", "keep houseplants alive", "run a useful meeting"),
    *("remember names", "paint a room", "invest for the first time", "improve handwriting", "plan a birthday party"),
)
HEROES = (
    *("an old lighthouse keeper", "a robot that is afraid of rain", "two sisters in a bakery", "a lost cat"),
    *("a clockmaker", "a girl who finds a map", "an astronaut who gardens", "a shy dragon", "a night bus driver"),
    *("a fox and a crow", "a librarian with a secret", "a violin", "a boy and a river", "the last bookshop"),
    *("a chef who lost the sense of taste", "a snowman in spring", "a mountain guide", "a painter", "a tiny whale"),
)
SENTENCES = (
    "the meeting was moved to thursday because the manager is sick and nobody told the clients",
    "She dont know where the keys is, but she think they was on the table yesterday.",
    "Our new app help people to finding cheap flights and it is very fastly.",
    "I am writing you for to ask if the order, that I made last week, it has been sended already.",
    "The results was good however the costs is too high, we should to wait.",
    "Because of the rain the game was cancelled and all of the fans they went home disappointed.",
    "It is important that every employee completes the training before the end of the month at the latest.",
    "The house, which was built by my grandfather in 1952, have a big garden with many old trees.",
    "hey, can u send me the report asap? boss is asking again and i have no clue what to say",
    "Due to the fact that the server was down, it was not possible for users to log in to their accounts.",
    "We have decided to terminate the contract, effective immediately, owing to repeated late deliveries.",
    "The cat sat on the mat, and then the cat saw a bird, and then the cat jumped, and the bird flew away.",
    "Me and him goes to the same school since five years.",
    "In my opinion I think that the film was very boring and also it was too long in my opinion.",
    "The quick growth of cities create problems with housing, traffic and the quality of air.",
    "Thank you for your patience while we was fixing the problem with you're account.",
)

CHAT = (
    "Explain {} to a ten-year-old.",
    "What are three surprising facts about {}?",
    "Why should people know about {}?",
    "Give me a short summary of {}.",
    "What is the history of {}?",
    "What are common misconceptions about {}?",
    "List five questions that a beginner would ask about {}, with answers.",
    "Compare {} with something from everyday life.",
)
ADVICE = (
    "How can I {}?",
    "Give me five tips to {}.",
    "I want to {}, but I have little time. What should I do?",
    "Make a step-by-step plan to {}.",
    "What mistakes do people make when they try to {}?",
)
CODE = (
    "Write a {1} function that {0}.",
    "Write a {1} function that {0}, and explain how it works.",
    "Write a {1} function that {0}. Include tests.",
    "Show two ways to write a {1} function that {0}. Which one is faster?",
    "Write a {1} program that {0}, with comments.",
)
WRITING = (
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Write the first paragraph of a novel about {}.",
    "Write a dialogue between {} and a stranger.",
    "Describe a day in the life of {}.",
    "Write a bedtime story about {} with a happy ending.",
)
ARTICLES = (
    "Write a short essay about {}.",
    "Write an introduction for a blog post about {}.",
    "Write a product description for a book about {}.",
    "Write an email that invites a friend to a talk about {}.",
    "Write a haiku about {}.",
    "Write a quiz with four questions about {}.",
)
EDITS = (
    "Correct the grammar: {}",
    "Rewrite this more formally: {}",
    "Make this shorter: {}",
    "Rewrite this in simple words: {}",
    "Translate into Spanish: {}",
    "Translate into French: {}",
    "Turn this into a polite email: {}",
    "Rewrite this as a list of points: {}",
    "Write a title for this text: {}",
    "Repeat this text, but in the past tense: {}",
    "Continue this text: {}",
    "Write a reply to this message: {}",
)
MATH = (
    "{name} has {a} {thing} and buys {b} more. Then {name} gives {c} to {other}. How many {thing} are left?",
    "A box holds {c} {thing}. {name} has {b} boxes and {a} loose {thing}. How many {thing} does {name} have in total?",
    "{name} sells {a} {thing} at ${c} each and spends ${b} on a lunch. How much money does {name} have now?",
    "{name} and {other} share {a} {thing}. {name} gets {c} more than {other}. How many {thing} does {other} get?",
    "{name} reads {c} pages a day. A book has {a} pages. How many pages are left after {b} days?",
    "A train travels {a} miles in {c} hours. How far does it travel in {b} hours at the same speed?",
    "{name} earns ${b} an hour and works {c} hours a day for 5 days. How much does {name} earn in a week?",
    "{name} buys {b} {thing} for ${c} each, with a discount of 10 percent. How much does {name} pay?",
    "In a class of {a} students, half have {thing}. Of these, {c} also have a dog. How many have no dog?",
    "{name} is {c} years older than {other}. Together they are {a} years old. How old is {other}?",
    "{name} bakes {a} {thing}, eats {c}, and packs the others into bags of {b}. How many bags are full?",
    "{name} saves ${c} every week. How many weeks does {name} need to buy a bicycle for ${a}?",
    "Solve for x: {c}x + {b} = {a}. Show each step.",
    "What is {a} times {b}, plus {c}? Explain your steps.",
    "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
)


def crossed(templates: Sequence[str], *topics: Sequence[str]) -> Iterator[str]:
    """Yield templates filled with topics, with few repetitions in a row; each combination at most once."""
    for number in range(len(templates) * len(topics[0])):
        # Each round of the templates moves on by one topic, so that all combinations appear.
        step = number + number // lcm(len(templates), len(topics[0]))
        others = [each[number % len(each)] for each in topics[1:]]
        yield templates[number % len(templates)].format(topics[0][step % len(topics[0])], *others)


def sums() -> Iterator[str]:
    """Yield word problems without end."""
    for number in count():
        yield MATH[number % len(MATH)].format(
            name=NAMES[number % len(NAMES)],
            other=NAMES[(number * 7 + 3) % len(NAMES)],
            thing=THINGS[(number * 5 + number // 19) % len(THINGS)],
            a=40 + 2 * (number * 37 % 90),
            b=3 + number * 11 % 12,
            c=2 + number * 5 % 9,
        )


def alternating(*sources: Iterator[str]) -> Iterator[str]:
    """Yield one item of each source in turn, until all are exhausted."""
    left = [*sources]
    while left:
        for source in [*left]:
            item = next(source, None)
            if item is None:
                left.remove(source)
            else:
                yield item


def sources() -> dict[str, Iterator[str]]:
    """Return the prompts of each kind."""
    return {
        "math": sums(),
        "chat": alternating(crossed(CHAT, SUBJECTS), crossed(ADVICE, GOALS)),
        "code": crossed(CODE, FUNCTIONS, LANGUAGES),
        "writing": alternating(crossed(WRITING, HEROES), crossed(ARTICLES, SUBJECTS)),
        "edits": crossed(EDITS, SENTENCES),
    }


def bundled_prompts() -> list[str]:
    """Return `COUNT` different prompts; each part of the list has several kinds."""
    seen = dict.fromkeys(islice(alternating(*sources().values()), 2 * COUNT))
    return [*islice(seen, COUNT)]
