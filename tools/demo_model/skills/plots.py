"""The plots of the stories: beats in order, each a choice of sentences with slots to fill.

The slots are those of `stories.tell`: {name} is the hero's name, {second} the story's other
subject, and {friend} a small animal that comes along.
"""

from typing import Final

Plot = tuple[tuple[str, ...], ...]

_INTRO: Final = (
    "Once upon a time, there was {a_adj} {hero} named {name}.",
    "Once there was {a_adj} {hero} called {name}.",
    "Long ago, there lived {a_adj} {hero} named {name}.",
)
PLACE_PLOTS: Final[tuple[Plot, ...]] = (
    (
        _INTRO,
        (
            "{Name} lived in a small house near the {second}.",
            "Every day {name} went for a walk near the {second}.",
        ),
        (
            "One morning, {he} heard somebody cry near the {second}.",
            "One day, {he} heard a small voice near the {second}.",
        ),
        ("It was a little {friend} who could not find the way home.",),
        (
            '"Do not be afraid," said {name}. "I will help you."',
            '"Please do not cry," said {name}. "I know the way."',
        ),
        (
            "They walked past the {second} until they saw a light.",
            "Together they walked around the {second} all day long.",
        ),
        (
            "At last they found the home of the {friend}.",
            "In the evening they found the mother of the {friend}.",
        ),
        (
            "From that day on, {name} and the {friend} were best friends.",
            "The {friend} thanked {name}, and they became good friends.",
        ),
    ),
    (
        _INTRO,
        (
            "{Name} had always wanted to see the {second}.",
            "{Name} dreamed of the {second} every night.",
        ),
        (
            "So one sunny day {he} packed some bread and left home.",
            "One morning {he} took {his} bag and began to walk.",
        ),
        (
            "On the way {he} met a {friend} who was hungry.",
            "Soon {he} met a tired {friend} by the road.",
        ),
        (
            "{Name} shared {his} bread, and the {friend} smiled.",
            "{Name} gave the {friend} half of {his} bread.",
        ),
        (
            '"I know the {second}," said the {friend}. "Follow me!"',
            '"Thank you," said the {friend}. "I will show you the {second}."',
        ),
        (
            "When they came to the {second}, the sun was going down.",
            "The {second} was even more beautiful than in the dream.",
        ),
        (
            "{Name} was very happy and never forgot that day.",
            "They sat there together and watched the stars.",
        ),
    ),
    (
        _INTRO,
        (
            "{Name} was afraid of the {second}, because it was dark there.",
            "Nobody dared to go near the {second}, not even {name}.",
        ),
        (
            "One night, a storm came and the wind began to howl.",
            "One evening, it rained and rained.",
        ),
        (
            "A {friend} was in trouble at the {second} and called for help.",
            "{Name} heard a {friend} call for help from the {second}.",
        ),
        (
            "{Name} took a deep breath and ran as fast as {he} could.",
            "{Name} was afraid, but {he} did not wait.",
        ),
        (
            "{He} pulled the {friend} out and took {his} new friend home.",
            "{He} found the {friend} and carried {his} new friend home.",
        ),
        (
            "After that, {name} was never afraid of the {second} again.",
            "Since then, {name} has loved the {second}.",
        ),
    ),
)
THING_PLOTS: Final[tuple[Plot, ...]] = (
    (
        _INTRO,
        (
            "One day, {name} found {a_second} under an old tree.",
            "One morning, {name} found {a_second} by the road.",
        ),
        (
            "{He} had never seen such a beautiful {second} before.",
            "It was the most beautiful {second} in the world.",
        ),
        (
            "Then {he} saw a {friend} who looked very sad.",
            "Just then a {friend} came along and began to cry.",
        ),
        (
            '"I have lost my {second}," said the {friend}.',
            '"Have you seen my {second}?" asked the {friend}.',
        ),
        (
            "{Name} wanted to keep it, but {he} gave the {second} back.",
            "{Name} thought for a moment and gave the {second} back.",
        ),
        (
            'The {friend} was so glad. "Let us share it!"',
            'The {friend} smiled. "You are very kind!"',
        ),
        (
            "From that day on, they played together every day.",
            "And so {name} found something better than {a_second}: a friend.",
        ),
    ),
    (
        _INTRO,
        (
            "More than anything, {name} wanted {a_second}.",
            "{Name} wished for {a_second} every night.",
        ),
        (
            "But {he} had no money, so {he} decided to make one.",
            'But nobody had one. "Then I will make one," said {name}.',
        ),
        (
            "The first {second} broke, and {name} was sad.",
            "The first {second} was much too small.",
        ),
        ("The second {second} fell into the mud.", "The second {second} was much too big."),
        (
            '"Try again," said a wise {friend}. "I will help you."',
            "Then a wise {friend} came to help.",
        ),
        (
            "The third {second} was just right.",
            "Together they made the best {second} of all.",
        ),
        (
            "{Name} was proud and thanked the {friend}.",
            "{Name} laughed and danced with the {friend} until night.",
        ),
    ),
)
ANIMAL_PLOTS: Final[tuple[Plot, ...]] = (
    (
        _INTRO,
        (
            "{Name} lived next to {a_second}, but they never talked.",
            "Not far away lived {a_second}, but the two were not friends.",
        ),
        (
            "One day, they both saw the same big apple.",
            "One day, they both found a big round cheese.",
        ),
        ('"It is mine!" said {name}.', '"I saw it first!" said {name}.'),
        ('"No, it is mine!" said the {second}.', '"No, I saw it first!" said the {second}.'),
        (
            "While they were fighting, a {friend} came and took it away.",
            "They were so loud that they did not see the {friend} who ate it.",
        ),
        (
            "{Name} looked at the {second}, and they both began to laugh.",
            '"Next time we will share," said {name}.',
        ),
        (
            "Since that day, they have shared everything.",
            "From then on, {name} and the {second} were good friends.",
        ),
    ),
    (
        _INTRO,
        (
            "One day, {name} met {a_second} on the road.",
            "One morning, {a_second} came to the door.",
        ),
        (
            '"I am faster than you," said the {second}. "Let us race!"',
            '"Let us run to the old tree," said the {second}. "I will win!"',
        ),
        (
            "They ran and ran, and the {second} was soon far ahead.",
            "At first, the {second} was much faster.",
        ),
        (
            "But then the {second} fell and hurt a leg.",
            "But then the {second} fell into a deep hole.",
        ),
        (
            "{Name} could have won, but {he} stopped to help.",
            "{Name} did not run on. {He} came back to help.",
        ),
        (
            '"You are a true friend," said the {second}.',
            '"Thank you," said the {second}. "You are the real winner."',
        ),
        (
            "They walked to the old tree together, and both of them won.",
            "That evening they ate cake together under the old tree.",
        ),
    ),
)
