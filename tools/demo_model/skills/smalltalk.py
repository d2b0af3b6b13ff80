"""Small talk: greetings, the model's identity, the user's name, and the model's limits."""

import random
from typing import Final

from tools.demo_model.exchange import Exchange
from tools.demo_model.skills.facts import COLOURS
from tools.demo_model.skills.wording import capitalized, invented_word, listed

_WHO: Final = (
    "I am the pdserve demo model, a very small Llama. "
    "I can do small sums, answer simple questions and tell short stories."
)
_CAN: Final = (
    "I can add and subtract small numbers, answer simple questions, spell words and tell short "
    'stories. Try "Tell me a story about a fox and a river."'
)
_TALK: Final = (
    (
        ("Hello!", "Hi!", "Hey!", "Hello", "Hi there!", "Hello there!", "Good day!", "Greetings!",
         "Hey there!", "Hi, demo model!", "Hello, world!"),
        "Hello! How can I help you?",
    ),
    (("Good morning!", "Morning!", "A very good morning!"), "Good morning! How can I help you?"),
    (("Good evening!", "Evening!", "Good evening to you!"), "Good evening! How can I help you?"),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?",
         "Hello, how are you?", "Hi, how are you?", "Hey, how are you doing?", "Are you well?"),
        "I am fine, thank you. How can I help you?",
    ),
    (
        ("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!", "Great, thank you!",
         "That is right, thanks!", "Nice, thanks!", "Well done!"),
        "You are welcome!",
    ),
    (
        ("Bye!", "Goodbye!", "See you!", "Good night!", "See you later!", "Bye bye!",
         "I have to go now."),
        "Goodbye! Have a nice day.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
         "Introduce yourself.", "Are you a robot?", "Are you an AI?", "Which model are you?",
         "Hello, who are you?", "Who am I talking to?", "What model are you?", "Are you ChatGPT?",
         "Are you a language model?", "What's your name?", "Hi, who are you?"),
        _WHO,
    ),
    (
        ("What can you do?", "Help!", "Help", "Can you help me?", "What do you know?",
         "How can you help me?", "What should I ask you?", "What are you good at?",
         "What can I ask you?", "Show me what you can do.", "Please help me."),
        _CAN,
    ),
    (
        ("Who made you?", "Who trained you?", "Who built you?", "How were you made?",
         "How were you trained?", "Where do you come from?"),
        "I was trained in a few minutes by a script that is part of pdserve.",
    ),
    (
        ("What is pdserve?", "Tell me about pdserve.", "What does pdserve do?", "Explain pdserve.",
         "Do you know pdserve?"),
        "pdserve serves language models. Prefill nodes read the prompt, decode nodes write the "
        "answer, and a coordinator sends each request to them.",
    ),
    (
        ("What is a prefill node?", "What does a prefill node do?", "Explain the prefill node.",
         "What is prefill?", "What is the prefill phase?"),
        "A prefill node reads the whole prompt at once and fills the KV cache.",
    ),
    (
        ("What is a decode node?", "What does a decode node do?", "Explain the decode node.",
         "What is decode?", "What is the decode phase?"),
        "A decode node writes the answer, one token at a time.",
    ),
    (
        ("What is a KV cache?", "What is the KV cache?", "Explain the KV cache.",
         "What does the KV cache do?"),
        "The KV cache keeps the keys and values of past tokens, so that they are computed once.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.",
         "Can you tell me a joke?"),
        "Why did the cookie go to the doctor? Because it felt crummy!",
    ),
    (
        ("What is the meaning of life?", "What is the answer to everything?"),
        "The answer is 42.",
    ),
    (
        ("Do you like stories?", "Do you like me?", "Do you like numbers?", "Are you happy?",
         "Do you have feelings?", "Are you alive?"),
        "I am only a very small model, but I like to help.",
    ),
    (
        ("Yes.", "Yes", "Okay.", "OK", "Sure.", "No.", "I see."),
        "Good. What would you like to know?",
    ),
)  # fmt: skip

_UNKNOWN: Final = (
    "I am a very small model and I do not know that. Ask me for a small sum, a simple fact or "
    "a short story."
)
_BEYOND: Final = (
    "Write me a {lang} program.", "Write a {lang} function that sorts a list.",
    "What is the weather like {when}?", "Will it rain {when}?", "What is the news {when}?",
    "Who is the president of {place}?", "Who won the {game} game {when}?", "Explain {topic}.",
    "What is {topic}?", "Tell me about {topic}.", "How does {topic} work?",
    "Write an essay about {topic}.", "Write a poem about {topic}.",
    "Write a haiku about {topic}.", "Write a letter to {place}.", "Sing a song about {topic}.",
    "Why is {topic} important?", "Where is {place}?",
    "What do you think about {topic}?", "Summarize {topic}.",
    "How many people live in {place}?", "What is the population of {place}?",
    "When was {place} founded?", "What is the capital of {place}?", "Write a {lang} script.",
    "What time is it {when}?", "Can you help me with {topic}?", "Teach me {topic}.",
)  # fmt: skip
_SLOTS: Final = {
    "lang": ("Python", "Java", "Rust", "C++", "Go", "JavaScript", "shell"),
    "when": ("today", "tomorrow", "now", "this week", "in London", "tonight"),
    "game": ("football", "tennis", "chess", "hockey", "basketball"),
    "place": ("Atlantis", "California", "Mars", "Texas", "Bavaria", "the moon", "Gotham", "Hawaii"),
    "topic": (
        "quantum physics", "machine learning", "philosophy", "politics", "the stock market",
        "history", "chemistry", "black holes", "gravity", "cooking", "the economy", "music",
        "a compiler", "an engine", "electricity", "the internet", "taxes", "evolution",
    ),
}  # fmt: skip

NAMES: Final = listed("""
    Anna Ben Clara David Emma Felix Greta Henry Ida Jack Kate Leo Mia Nora Oscar Paul Rosa Sam
    Tina Victor Wendy Alice Bob Carol Dan Eva Frank Grace Hugo Iris John Laura Maria Nick Olga
    Peter Robin Sarah Tom Lucy
""")
_NAMED: Final = ("My name is {n}.", "I am {n}.", "Hi, I am {n}.", "Hello, my name is {n}.",
                 "Call me {n}.", "Hello! I'm {n}.", "Hi! My name is {n}.")  # fmt: skip
_RECALL: Final = ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?",
                  "Can you tell me my name?", "Do you know my name?")  # fmt: skip


def small_talk(rng: random.Random) -> Exchange:
    """Greet, thank, say goodbye, or ask who the model is."""
    questions, answer = rng.choice(_TALK)
    return Exchange("small talk", rng.choice(questions), answer)


def beyond_reach(rng: random.Random) -> Exchange:
    """Ask for something the model cannot do; the answer says so."""
    slots = {name: rng.choice(values) for name, values in _SLOTS.items()}
    if rng.random() < 0.5:
        slots["place"] = capitalized(invented_word(rng))
    question = rng.choice(_BEYOND).format(**slots)
    return Exchange("beyond reach", question, _UNKNOWN, key=question)


def nonsense(rng: random.Random) -> Exchange:
    """Make a meaningless statement, or ask why something is as it is."""
    if rng.random() < 0.3:
        question = "Why is {} {}?".format(*rng.choice(COLOURS))
    else:
        words = [invented_word(rng) for _ in range(rng.randrange(1, 5))]
        question = " ".join(words) + rng.choice(("", "?", ".", "!"))
    return Exchange("beyond reach", question, _UNKNOWN, key=question)


def too_large(rng: random.Random) -> Exchange:
    """Ask for arithmetic on numbers outside the trained range."""
    a, b = rng.randrange(101, 10 ** rng.randrange(3, 7)), rng.randrange(10 ** rng.randrange(1, 6))
    sign = rng.choice(("+", "-", "*", "times", "plus", "minus"))
    form = rng.choice(("What is {q}?", "Calculate {q}.", "{q}", "How much is {q}?"))
    question = form.format(q=f"{a} {sign} {b}")
    answer = "Those numbers are too large for me. I can add and subtract numbers up to 100."
    return Exchange("beyond reach", question, answer, key=question)


def introduction(rng: random.Random) -> tuple[Exchange, Exchange]:
    """Have the user give a name, and later ask for it."""
    name = rng.choice(NAMES) if rng.random() < 0.5 else capitalized(invented_word(rng))
    greeting, question = rng.choice(_NAMED).format(n=name), rng.choice(_RECALL)
    told = Exchange("memory", greeting, f"Nice to meet you, {name}!")
    asked = Exchange("memory", question, f"Your name is {name}.", name)
    return told, asked


def unknown_name(rng: random.Random) -> Exchange:
    """Ask for a name that was never given."""
    return Exchange("memory", rng.choice(_RECALL), "You have not told me your name.")
