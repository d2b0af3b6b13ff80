"""The facts that the demo model learns: small tables with one right answer each."""

from typing import Final

from tools.demo_model.skills.wording import listed

Facts = tuple[tuple[str, str], ...]


def _table(text: str) -> Facts:
    """Parse "key: value; key: value" over several lines."""
    entries = (entry.split(":") for entry in text.replace("\n", " ").split(";") if entry.strip())
    return tuple((key.strip(), value.strip()) for key, value in entries)


CAPITALS: Final = _table("""
    France: Paris; Italy: Rome; Spain: Madrid; Germany: Berlin; Portugal: Lisbon;
    England: London; Ireland: Dublin; Scotland: Edinburgh; Austria: Vienna; Greece: Athens;
    Poland: Warsaw; Sweden: Stockholm; Norway: Oslo; Denmark: Copenhagen; Finland: Helsinki;
    Iceland: Reykjavik; Belgium: Brussels; Hungary: Budapest; Romania: Bucharest;
    Switzerland: Bern; Ukraine: Kyiv; Russia: Moscow; Turkey: Ankara; Egypt: Cairo;
    Kenya: Nairobi; Morocco: Rabat; Nigeria: Abuja; Ghana: Accra; Ethiopia: Addis Ababa;
    Japan: Tokyo; China: Beijing; India: New Delhi; Thailand: Bangkok; Vietnam: Hanoi;
    South Korea: Seoul; Indonesia: Jakarta; Nepal: Kathmandu; Iran: Tehran; Iraq: Baghdad;
    Australia: Canberra; New Zealand: Wellington; Canada: Ottawa; Mexico: Mexico City;
    Cuba: Havana; Brazil: Brasília; Argentina: Buenos Aires; Chile: Santiago; Peru: Lima;
    Colombia: Bogotá; the United States: Washington, D.C.; Croatia: Zagreb; Serbia: Belgrade
""")

CONTINENTS: Final = _table("""
    France: Europe; Italy: Europe; Spain: Europe; Germany: Europe; Portugal: Europe;
    Poland: Europe; Sweden: Europe; Norway: Europe; Greece: Europe; Ireland: Europe;
    Egypt: Africa; Kenya: Africa; Morocco: Africa; Nigeria: Africa; Ghana: Africa;
    Ethiopia: Africa; Japan: Asia; China: Asia; India: Asia; Thailand: Asia; Vietnam: Asia;
    Nepal: Asia; Iran: Asia; Canada: North America; Mexico: North America;
    Brazil: South America; Argentina: South America; Chile: South America; Peru: South America
""")

OPPOSITES: Final = _table("""
    hot: cold; big: small; up: down; day: night; happy: sad; fast: slow; light: dark;
    open: closed; old: young; wet: dry; full: empty; left: right; good: bad; high: low;
    hard: soft; early: late; long: short; loud: quiet; rich: poor; strong: weak; black: white;
    in: out; front: back; first: last; clean: dirty; thick: thin; wide: narrow; near: far;
    heavy: light; true: false; easy: difficult; love: hate; war: peace; begin: end; win: lose;
    push: pull; buy: sell; give: take; sweet: sour; brave: afraid; always: never;
    inside: outside; above: below; deep: shallow; sharp: blunt; summer: winter; north: south;
    east: west; laugh: cry; asleep: awake; before: after; tall: short; cheap: expensive;
    cold: hot; small: big; night: day; sad: happy; slow: fast; down: up; dry: wet; empty: full
""")

COLOURS: Final = _table("""
    the sky: blue; grass: green; snow: white; a banana: yellow; a tomato: red; coal: black;
    a lemon: yellow; blood: red; the sun: yellow; milk: white; a carrot: orange;
    a strawberry: red; a frog: green; a flamingo: pink; chocolate: brown; a pumpkin: orange;
    the sea: blue; a cucumber: green; an elephant: grey; a polar bear: white; a raven: black;
    gold: yellow; silver: grey; a leaf: green; salt: white; a cherry: red;
    a plum: purple; an eggplant: purple; a fire truck: red; sand: yellow; a pig: pink;
    a swan: white; tea: brown; spinach: green; a sunflower: yellow; an emerald: green;
    a ruby: red; wood: brown; an orange: orange
""")

SOUNDS: Final = _table("""
    cow: moo; dog: woof; cat: meow; sheep: baa; duck: quack; pig: oink; horse: neigh;
    rooster: cock-a-doodle-doo; owl: hoot; frog: ribbit; lion: roar; bee: buzz; snake: hiss;
    mouse: squeak; donkey: hee-haw; wolf: howl; turkey: gobble; crow: caw; goat: maa;
    chick: cheep; bear: growl; pigeon: coo
""")

YOUNG: Final = _table("""
    dog: puppy; cat: kitten; cow: calf; sheep: lamb; horse: foal; pig: piglet; goat: kid;
    duck: duckling; hen: chick; bear: cub; lion: cub; kangaroo: joey; frog: tadpole;
    swan: cygnet; deer: fawn; owl: owlet; goose: gosling; elephant: calf; eagle: eaglet
""")

HOMES: Final = _table("""
    bee: hive; bird: nest; spider: web; fox: den; rabbit: burrow; horse: stable; pig: sty;
    hen: coop; dog: kennel; beaver: lodge; bear: den; ant: anthill; fish: sea
""")

LEGS: Final = _table("""
    dog: 4; cat: 4; spider: 8; ant: 6; bee: 6; chicken: 2; horse: 4; cow: 4; duck: 2;
    snake: 0; fish: 0; elephant: 4; beetle: 6; frog: 4; owl: 2; human: 2; lion: 4;
    butterfly: 6; crab: 10; goat: 4; worm: 0; penguin: 2
""")

PLURALS: Final = _table("""
    mouse: mice; child: children; foot: feet; tooth: teeth; goose: geese; man: men;
    woman: women; sheep: sheep; leaf: leaves; wolf: wolves; knife: knives; baby: babies;
    city: cities; box: boxes; fish: fish; cat: cats; dog: dogs; book: books; star: stars;
    fox: foxes; berry: berries; bus: buses; life: lives; person: people
""")

PAST: Final = _table("""
    go: went; see: saw; eat: ate; run: ran; sing: sang; swim: swam; write: wrote; give: gave;
    take: took; come: came; think: thought; buy: bought; fly: flew; drink: drank; know: knew;
    find: found; make: made; say: said; walk: walked; play: played; sleep: slept; read: read;
    speak: spoke; fall: fell; build: built; teach: taught; catch: caught; break: broke
""")

DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
MONTH_LENGTHS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS: Final = (
    "first", "second", "third", "fourth", "fifth", "sixth",
    "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip
ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

FRENCH: Final = _table("""
    dog: chien; cat: chat; house: maison; water: eau; bread: pain; book: livre; tree: arbre;
    sun: soleil; moon: lune; boy: garçon; school: école; friend: ami; red: rouge; blue: bleu;
    hello: bonjour; thank you: merci; yes: oui; no: non; night: nuit; day: jour; fish: poisson;
    milk: lait; cheese: fromage; star: étoile; summer: été; horse: cheval; bird: oiseau;
    apple: pomme; king: roi; green: vert
""")
SPANISH: Final = _table("""
    dog: perro; cat: gato; house: casa; water: agua; bread: pan; book: libro; tree: árbol;
    sun: sol; moon: luna; boy: niño; school: escuela; friend: amigo; red: rojo; blue: azul;
    hello: hola; thank you: gracias; yes: sí; no: no; night: noche; day: día; fish: pez;
    milk: leche; cheese: queso; star: estrella; summer: verano; horse: caballo; bird: pájaro;
    apple: manzana; king: rey; green: verde
""")
GERMAN: Final = _table("""
    dog: Hund; cat: Katze; house: Haus; water: Wasser; bread: Brot; book: Buch; tree: Baum;
    sun: Sonne; moon: Mond; boy: Junge; school: Schule; friend: Freund; red: rot; blue: blau;
    hello: hallo; thank you: danke; yes: ja; no: nein; night: Nacht; day: Tag; fish: Fisch;
    milk: Milch; cheese: Käse; star: Stern; summer: Sommer; horse: Pferd; bird: Vogel;
    apple: Apfel; king: König; green: grün
""")
EMOJI: Final = _table("""
    fox: 🦊; cat: 🐱; dog: 🐶; sun: 🌞; moon: 🌙; star: ⭐; tree: 🌳; apple: 🍎; fish: 🐟; owl: 🦉;
    frog: 🐸; bear: 🐻; lion: 🦁; heart: ❤️; fire: 🔥; rainbow: 🌈; house: 🏠; car: 🚗; rocket: 🚀;
    pizza: 🍕
""")

SINGLE: Final = _table("""
    How many days are in a week?: There are 7 days in a week.;
    How many months are in a year?: There are 12 months in a year.;
    How many hours are in a day?: There are 24 hours in a day.;
    How many minutes are in an hour?: There are 60 minutes in an hour.;
    How many seconds are in a minute?: There are 60 seconds in a minute.;
    How many days are in a year?: There are 365 days in a year.;
    How many weeks are in a year?: There are 52 weeks in a year.;
    How many seasons are in a year?: There are 4 seasons in a year.;
    How many letters are in the alphabet?: There are 26 letters in the alphabet.;
    How many sides does a triangle have?: A triangle has 3 sides.;
    How many sides does a square have?: A square has 4 sides.;
    How many wheels does a bicycle have?: A bicycle has 2 wheels.;
    How many wheels does a car have?: A car has 4 wheels.;
    How many fingers are on one hand?: There are 5 fingers on one hand.;
    How many colours are in the rainbow?: There are 7 colours in the rainbow.;
    How many planets are in the solar system?: There are 8 planets in the solar system.;
    What is the largest planet?: The largest planet is Jupiter.;
    What is the largest ocean?: The largest ocean is the Pacific Ocean.;
    What is the highest mountain?: The highest mountain is Mount Everest.;
    What is the fastest land animal?: The fastest land animal is the cheetah.;
    What is the largest animal?: The largest animal is the blue whale.;
    What is the tallest animal?: The tallest animal is the giraffe.;
    What do bees make?: Bees make honey.;
    What do cows eat?: Cows eat grass.;
    What do pandas eat?: Pandas eat bamboo.;
    What do you get when water freezes?: When water freezes, you get ice.;
    What is the coldest season?: The coldest season is winter.;
    What is the hottest season?: The hottest season is summer.;
    Which planet do we live on?: We live on the planet Earth.;
    What is the name of our star?: Our star is called the Sun.;
    Who wrote Romeo and Juliet?: William Shakespeare wrote Romeo and Juliet.;
    Who painted the Mona Lisa?: Leonardo da Vinci painted the Mona Lisa.;
    What are the three primary colours?: The three primary colours are red, yellow and blue.;
    What are the four seasons?: The four seasons are spring, summer, autumn and winter.;
    What colours are in the rainbow?:
        The rainbow is red, orange, yellow, green, blue, indigo and violet.
""")

WORDS: Final = listed("""
    cat dog sun moon star tree fish bird book king milk bread apple river house water light
    night green horse table chair cloud stone happy smile queen train plane sugar lemon tiger
    zebra mouse snake sheep goat frog duck bear wolf lion fox owl bee ant egg hat cup bag box
    pen map key car bus boat road hill lake snow rain wind fire gold ring bell drum kite ball
    door wall lamp clock paper music dance dream heart hand foot nose mouth grass leaf seed
    rose corn rice soup cake jam tea salt garden window summer winter spring autumn banana
    orange cherry carrot potato tomato kitten rabbit monkey spider parrot dragon castle island
    forest bridge flower butter cheese cookie strawberry elephant computer model server token
""")
