"""Everyday words, cities and names that the tasks are about."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Nouns, in lower case.
NOUNS = _words(
    """
    ant apple apron arm arrow autumn axe baby badge bag ball balloon banana band bank barn basket
    bat beach bean bear beaver bed bee bell belt bench berry bicycle bird biscuit blanket boat book
    boot bottle bowl box branch bread brick bridge broom brother brush bucket butter button cabin
    cake camel camera candle canoe car card carpet carrot castle cat cave ceiling chain chair chalk
    cheese cherry chess chicken circle clock cloud clover coat coconut coffee coin comb compass
    cookie copper corn cotton cow crab cradle crayon cricket crow crown cup curtain daisy deer
    desert desk diamond dinner doctor dog doll dolphin donkey door dragon drawer dress drum duck
    eagle ear earth egg elbow elephant engine envelope evening eye face falcon farm farmer feather
    fence field finger fire fish flag flame flower flute fog forest fork fox frog fruit garden
    garlic gate ghost giraffe glass globe glove goat gold goose grape grass guitar hammer hand
    harbor harp hat hawk heart hen hill honey hook horse hotel house ice ink insect iron island
    ivory jacket jar jelly jewel juice jungle kettle key king kitchen kite kitten knee knife ladder
    lake lamb lamp lantern leaf leather lemon letter library light lily lion lizard lobster lock
    log lunch machine magnet mango map maple marble market mask meadow melon milk mill mirror
    monkey moon morning moss mountain mouse mouth mushroom music nail napkin neck needle nest net
    night noodle north nose notebook nurse nut oak oar ocean office olive onion orange orchid otter
    oven owl ox oyster page paint palace pan panda paper parrot peach pear pearl pebble pen pencil
    pepper piano picture pie pig pigeon pillow pilot pine pirate pizza planet plate plum pocket
    pond pony potato puppy purse puzzle queen quilt rabbit radio rain rainbow raven ribbon rice
    ring river road robin robot rock rocket roof room root rope rose ruler sail salad salmon salt
    sand sandal saucer scarf school scissors seal seed shadow shark sheep shell ship shirt shoe
    shovel silk silver sister skirt sky sled snail snake snow soap sock sofa soup spider spoon
    spring squirrel stairs star station statue stone stool storm stove strawberry street sugar
    summer sun swan sweater sword table tail tailor tea teacher temple tent thread throne thumb
    thunder ticket tiger toast tomato tooth torch towel tower town train tree trumpet tulip tunnel
    turkey turnip turtle umbrella uncle valley vase village vinegar violin volcano wagon wall
    walnut walrus water wave whale wheat wheel whistle willow wind window winter wolf wood wool
    worm wren yarn yogurt zebra zipper
    """
)
FIRST_NAMES = _words(
    """
    Adam Alice Amir Anna Ben Carla Chen Clara David Diego Elena Emma Eva Fatima Felix George Grace
    Hana Hugo Ines Ivan James Julia Karl Lara Leo Lina Lucas Maria Mark Maya Mia Nina Noah Omar
    Oscar Paul Petra Rosa Ruth Sam Sara Sofia Tom Vera Yuki Zoe
    """
)
CITIES = _words(
    """
    Amsterdam Athens Berlin Bern Boston Brussels Cairo Chicago Dakar Delhi Dublin Geneva Hamburg
    Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid Manila Miami
    Milan Montreal Moscow Mumbai Munich Nairobi Osaka Oslo Paris Porto Prague Quito Riga Rome Seoul
    Seville Sofia Sydney Tallinn Tokyo Toronto Tunis Turin Vancouver Vienna Vilnius Warsaw Zagreb
    Zurich
    """
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TOPICS = (
    *("solar power", "electric cars", "the moon landing", "healthy breakfasts", "chess openings"),
    *("coral reefs", "wind turbines", "ancient Rome", "space telescopes", "bird migration"),
    *("sourdough bread", "train travel", "mountain hiking", "deep sea fish", "modern art"),
    *("jazz music", "rice farming", "river floods", "city gardens", "wild bees", "old maps"),
    *("sailing boats", "polar bears", "desert plants", "volcano eruptions", "board games"),
    *("film festivals", "football results", "tea culture", "language learning", "robot vacuums"),
    *("home insulation", "water filters", "bicycle repair", "stock prices", "school holidays"),
    *("museum tickets", "weather satellites", "tall ships", "paper recycling", "night trains"),
)
VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"
