"""Tables of true facts: elements, words, the calendar, measures, animals, planets, books.

Every table is a function: one left side, one right side. A word with two fair answers ("light": dark or heavy) stands
in at most one pair, or is left out.
"""

from __future__ import annotations

from examples.countries import parse_pairs

# In order of atomic number. Names as the IUPAC spells them (aluminium, caesium, sulfur).
# (symbol, name); the atomic number is the position, from 1
ELEMENTS = parse_pairs("""
    H: hydrogen; He: helium; Li: lithium; Be: beryllium; B: boron; C: carbon; N: nitrogen; O: oxygen; F: fluorine;
    Ne: neon; Na: sodium; Mg: magnesium; Al: aluminium; Si: silicon; P: phosphorus; S: sulfur; Cl: chlorine; Ar: argon;
    K: potassium; Ca: calcium; Sc: scandium; Ti: titanium; V: vanadium; Cr: chromium; Mn: manganese; Fe: iron;
    Co: cobalt; Ni: nickel; Cu: copper; Zn: zinc; Ga: gallium; Ge: germanium; As: arsenic; Se: selenium; Br: bromine;
    Kr: krypton; Rb: rubidium; Sr: strontium; Y: yttrium; Zr: zirconium; Nb: niobium; Mo: molybdenum; Tc: technetium;
    Ru: ruthenium; Rh: rhodium; Pd: palladium; Ag: silver; Cd: cadmium; In: indium; Sn: tin; Sb: antimony;
    Te: tellurium; I: iodine; Xe: xenon; Cs: caesium; Ba: barium; La: lanthanum; Ce: cerium; Pr: praseodymium;
    Nd: neodymium; Pm: promethium; Sm: samarium; Eu: europium; Gd: gadolinium; Tb: terbium; Dy: dysprosium; Ho: holmium;
    Er: erbium; Tm: thulium; Yb: ytterbium; Lu: lutetium; Hf: hafnium; Ta: tantalum; W: tungsten; Re: rhenium;
    Os: osmium; Ir: iridium; Pt: platinum; Au: gold; Hg: mercury; Tl: thallium; Pb: lead; Bi: bismuth; Po: polonium;
    At: astatine; Rn: radon; Fr: francium; Ra: radium; Ac: actinium; Th: thorium; Pa: protactinium; U: uranium;
    Np: neptunium; Pu: plutonium; Am: americium; Cm: curium; Bk: berkelium; Cf: californium; Es: einsteinium;
    Fm: fermium; Md: mendelevium; No: nobelium; Lr: lawrencium; Rf: rutherfordium; Db: dubnium; Sg: seaborgium;
    Bh: bohrium; Hs: hassium; Mt: meitnerium; Ds: darmstadtium; Rg: roentgenium; Cn: copernicium; Nh: nihonium;
    Fl: flerovium; Mc: moscovium; Lv: livermorium; Ts: tennessine; Og: oganesson
""")

# Each word stands in one pair only, so the pairs can be asked about in both directions.
OPPOSITES = parse_pairs("""
    hot: cold; big: small; up: down; in: out; open: closed; early: late; happy: sad; fast: slow; heavy: light;
    bright: dim; full: empty; high: low; long: short; wide: narrow; deep: shallow; thick: thin; strong: weak; wet: dry;
    clean: dirty; rich: poor; old: young; good: bad; hard: soft; easy: difficult; loud: quiet; near: far; left: right;
    first: last; true: false; yes: no; day: night; black: white; front: back; top: bottom; inside: outside;
    before: after; above: below; over: under; begin: end; start: stop; push: pull; give: take; buy: sell; win: lose;
    love: hate; laugh: cry; live: die; remember: forget; arrive: depart; borrow: lend; teach: learn; ask: answer;
    accept: reject; add: subtract; multiply: divide; attack: defend; build: destroy; appear: disappear; agree: disagree;
    allow: forbid; ancient: modern; asleep: awake; beautiful: ugly; brave: cowardly; careful: careless;
    cheap: expensive; clever: stupid; common: rare; cruel: kind; dangerous: safe; alive: dead; dull: shiny; east: west;
    north: south; enemy: friend; entrance: exit; even: odd; ever: never; everything: nothing; everybody: nobody;
    fail: succeed; float: sink; fresh: stale; generous: stingy; guilty: innocent; healthy: sick; heaven: hell;
    hero: villain; honest: dishonest; include: exclude; increase: decrease; export: import; junior: senior;
    legal: illegal; lock: unlock; major: minor; many: few; more: less; maximum: minimum; best: worst; better: worse;
    noisy: silent; obey: disobey; often: seldom; optimist: pessimist; past: future; patient: impatient; peace: war;
    permanent: temporary; plural: singular; polite: rude; positive: negative; possible: impossible; private: public;
    proud: humble; raw: cooked; rough: smooth; sharp: blunt; simple: complicated; sour: sweet; straight: crooked;
    sunrise: sunset; tight: loose; together: apart; victory: defeat; visible: invisible; vertical: horizontal;
    wild: tame; with: without; zenith: nadir; truth: lie; ceiling: floor
""")

PLURALS = parse_pairs("""
    mouse: mice; foot: feet; tooth: teeth; goose: geese; man: men; woman: women; child: children; ox: oxen;
    louse: lice; leaf: leaves; knife: knives; wife: wives; life: lives; wolf: wolves; half: halves; shelf: shelves;
    loaf: loaves; thief: thieves; calf: calves; elf: elves; sheep: sheep; city: cities; baby: babies; lady: ladies;
    fly: flies; story: stories; country: countries; party: parties; box: boxes; fox: foxes; bus: buses; glass: glasses;
    dish: dishes; church: churches; watch: watches; potato: potatoes; tomato: tomatoes; hero: heroes; echo: echoes;
    piano: pianos; photo: photos; radio: radios; crisis: crises; analysis: analyses; thesis: theses; oasis: oases;
    phenomenon: phenomena; criterion: criteria; bacterium: bacteria; cat: cats; dog: dogs; book: books; house: houses;
    tree: trees; car: cars; day: days; boy: boys; key: keys; toy: toys; person: people
""")

PAST_TENSES = parse_pairs("""
    go: went; see: saw; eat: ate; drink: drank; sing: sang; swim: swam; run: ran; come: came; give: gave; take: took;
    make: made; have: had; do: did; say: said; think: thought; buy: bought; bring: brought; catch: caught;
    teach: taught; fight: fought; find: found; write: wrote; ride: rode; drive: drove; break: broke; speak: spoke;
    steal: stole; choose: chose; freeze: froze; know: knew; grow: grew; throw: threw; fly: flew; draw: drew;
    begin: began; ring: rang; sit: sat; stand: stood; win: won; sleep: slept; keep: kept; feel: felt; leave: left;
    meet: met; send: sent; build: built; sell: sold; tell: told; hear: heard; fall: fell; forget: forgot; wear: wore
""")

YOUNG = parse_pairs("""
    cat: kitten; dog: puppy; cow: calf; horse: foal; sheep: lamb; goat: kid; pig: piglet; chicken: chick;
    duck: duckling; goose: gosling; swan: cygnet; lion: cub; tiger: cub; bear: cub; leopard: cub; wolf: pup; seal: pup;
    bat: pup; shark: pup; deer: fawn; kangaroo: joey; koala: joey; frog: tadpole; butterfly: caterpillar; eagle: eaglet;
    owl: owlet; hare: leveret; elephant: calf; whale: calf; giraffe: calf; dolphin: calf; donkey: foal; zebra: foal;
    eel: elver; hedgehog: hoglet; spider: spiderling; pigeon: squab; turkey: poult; penguin: chick; llama: cria
""")

SOUNDS = parse_pairs("""
    dog: barks; cat: meows; cow: moos; sheep: bleats; goat: bleats; horse: neighs; donkey: brays; pig: oinks;
    duck: quacks; goose: honks; hen: clucks; rooster: crows; lion: roars; tiger: roars; wolf: howls; snake: hisses;
    frog: croaks; bee: buzzes; owl: hoots; crow: caws; mouse: squeaks; elephant: trumpets; dove: coos; turkey: gobbles;
    cricket: chirps; bear: growls; pigeon: coos; sparrow: chirps
""")

COLOURS = parse_pairs("""
    grass: green; snow: white; coal: black; blood: red; milk: white; chocolate: brown; spinach: green; salt: white;
    chalk: white; broccoli: green; charcoal: black; soot: black; tar: black; a ripe banana: yellow; a carrot: orange;
    a lemon: yellow; a ripe tomato: red; a ruby: red; an emerald: green; a sapphire: blue; an aubergine: purple;
    a flamingo: pink; a polar bear: white; a crow: black; an egg yolk: yellow; a pumpkin: orange; a cucumber: green;
    a ripe strawberry: red; a lime: green; a sunflower: yellow; an elephant: grey; a canary: yellow;
    the daytime sky: blue; a stop sign: red
""")

# ("metres in a kilometre", "1,000")
MEASURES = parse_pairs("""
    metres in a kilometre: 1,000; centimetres in a metre: 100; millimetres in a centimetre: 10;
    millimetres in a metre: 1,000; grams in a kilogram: 1,000; milligrams in a gram: 1,000; kilograms in a tonne: 1,000;
    millilitres in a litre: 1,000; seconds in a minute: 60; minutes in an hour: 60; seconds in an hour: 3,600;
    hours in a day: 24; minutes in a day: 1,440; days in a week: 7; hours in a week: 168; days in a leap year: 366;
    days in a common year: 365; months in a year: 12; years in a decade: 10; years in a century: 100;
    years in a millennium: 1,000; days in a fortnight: 14; inches in a foot: 12; feet in a yard: 3;
    yards in a mile: 1,760; feet in a mile: 5,280; ounces in a pound: 16; pints in a quart: 2; quarts in a gallon: 4;
    bits in a byte: 8; cents in a euro: 100; cents in a dollar: 100; degrees in a full circle: 360;
    degrees in a right angle: 90; eggs in a dozen: 12; letters in the English alphabet: 26;
    planets in the Solar System: 8; bones in the adult human body: 206; players in a string quartet: 4
""")

SIDES = parse_pairs("""
    triangle: 3; square: 4; rectangle: 4; rhombus: 4; trapezium: 4; quadrilateral: 4; pentagon: 5; hexagon: 6;
    heptagon: 7; octagon: 8; nonagon: 9; decagon: 10; dodecagon: 12
""")

SUPERLATIVES = parse_pairs("""
    largest ocean: the Pacific Ocean; smallest ocean: the Arctic Ocean; largest continent: Asia; largest country by
    area: Russia; smallest country by area: Vatican City; largest island: Greenland; highest mountain above sea
    level: Mount Everest; deepest lake: Lake Baikal; largest hot desert: the Sahara; fastest land animal: the cheetah;
    tallest animal: the giraffe; largest animal: the blue whale; largest living bird: the ostrich; longest bone in the
    human body: the femur; hardest natural mineral: diamond; lightest chemical element: hydrogen; largest planet in the
    Solar System: Jupiter; smallest planet in the Solar System: Mercury; hottest planet in the Solar System: Venus; star
    nearest to Earth: the Sun
""")

AUTHORS = parse_pairs("""
    Hamlet: William Shakespeare; Macbeth: William Shakespeare; Romeo and Juliet: William Shakespeare;
    Pride and Prejudice: Jane Austen; Emma: Jane Austen; Oliver Twist: Charles Dickens;
    Great Expectations: Charles Dickens; War and Peace: Leo Tolstoy; Anna Karenina: Leo Tolstoy;
    Crime and Punishment: Fyodor Dostoevsky; Don Quixote: Miguel de Cervantes; Frankenstein: Mary Shelley;
    Dracula: Bram Stoker; Jane Eyre: Charlotte Brontë; Wuthering Heights: Emily Brontë; Moby-Dick: Herman Melville;
    Animal Farm: George Orwell; The Hobbit: J. R. R. Tolkien; Treasure Island: Robert Louis Stevenson;
    Les Misérables: Victor Hugo; Madame Bovary: Gustave Flaubert; The Divine Comedy: Dante Alighieri;
    The Time Machine: H. G. Wells; The Jungle Book: Rudyard Kipling; The Old Man and the Sea: Ernest Hemingway;
    Around the World in Eighty Days: Jules Verne; The Three Musketeers: Alexandre Dumas; Paradise Lost: John Milton;
    Robinson Crusoe: Daniel Defoe; Gulliver's Travels: Jonathan Swift; The Great Gatsby: F. Scott Fitzgerald
""")


DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
# (month, number of days), in the order of the year.
MONTHS = parse_pairs("""
    January: 31; February: 28 or 29; March: 31; April: 30; May: 31; June: 30; July: 31; August: 31; September: 30;
    October: 31; November: 30; December: 31
""")
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
# fmt: off
ORDINALS = [
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
]
SMALL_NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
# fmt: on
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def number_in_words(number: int) -> str:
    """English words for 0 <= number <= 100 (42 -> "forty-two")."""
    if number < 20:
        return SMALL_NUMBERS[number]
    if number == 100:
        return "one hundred"
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL_NUMBERS[ones]}" if ones else "")


def with_article(noun: str) -> str:
    """ "owl" -> "an owl". Enough for the tables above, which hold no "hour" and no "unicorn"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
