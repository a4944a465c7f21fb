"""The capital and the continent of 197 states: the 193 members of the United Nations and four more.

The four are Vatican City, Palestine, Taiwan and Kosovo. Where a state's institutions sit in several cities, or where
its claim is disputed, the table holds the capital that its own constitution or law names, or else the one that atlases
print: Sucre for Bolivia, Amsterdam for the Netherlands, Pretoria for South Africa, Yaren for Nauru. Names that take
an article in a sentence carry it here ("the Netherlands").
"""

from __future__ import annotations

# Seven states lie on the border of Europe and Asia by one convention or another. They have a capital and no continent
# here, because a question with two defensible answers is no fact.
NO_SINGLE_CONTINENT = "Europe and Asia"

STATES_BY_CONTINENT: dict[str, str] = {
    "Africa": """
        Algeria: Algiers; Angola: Luanda; Benin: Porto-Novo; Botswana: Gaborone; Burkina Faso: Ouagadougou;
        Burundi: Gitega; Cameroon: Yaoundé; Cape Verde: Praia; the Central African Republic: Bangui; Chad: N'Djamena;
        the Comoros: Moroni; the Democratic Republic of the Congo: Kinshasa; Djibouti: Djibouti; Egypt: Cairo;
        Equatorial Guinea: Ciudad de la Paz; Eritrea: Asmara; Eswatini: Mbabane; Ethiopia: Addis Ababa;
        Gabon: Libreville; the Gambia: Banjul; Ghana: Accra; Guinea: Conakry; Guinea-Bissau: Bissau;
        Ivory Coast: Yamoussoukro; Kenya: Nairobi; Lesotho: Maseru; Liberia: Monrovia; Libya: Tripoli;
        Madagascar: Antananarivo; Malawi: Lilongwe; Mali: Bamako; Mauritania: Nouakchott; Mauritius: Port Louis;
        Morocco: Rabat; Mozambique: Maputo;
        Namibia: Windhoek; Niger: Niamey; Nigeria: Abuja; the Republic of the Congo: Brazzaville; Rwanda: Kigali;
        São Tomé and Príncipe: São Tomé; Senegal: Dakar; Seychelles: Victoria; Sierra Leone: Freetown;
        Somalia: Mogadishu; South Africa: Pretoria; South Sudan: Juba; Sudan: Khartoum; Tanzania: Dodoma; Togo: Lomé;
        Tunisia: Tunis; Uganda: Kampala; Zambia: Lusaka; Zimbabwe: Harare
    """,
    "Asia": """
        Afghanistan: Kabul; Bahrain: Manama; Bangladesh: Dhaka; Bhutan: Thimphu; Brunei: Bandar Seri Begawan;
        Cambodia: Phnom Penh; China: Beijing; India: New Delhi; Indonesia: Jakarta; Iran: Tehran; Iraq: Baghdad;
        Israel: Jerusalem; Japan: Tokyo; Jordan: Amman; Kuwait: Kuwait City; Kyrgyzstan: Bishkek; Laos: Vientiane;
        Lebanon: Beirut; Malaysia: Kuala Lumpur; the Maldives: Malé; Mongolia: Ulaanbaatar; Myanmar: Naypyidaw;
        Nepal: Kathmandu; North Korea: Pyongyang; Oman: Muscat; Pakistan: Islamabad; Palestine: East Jerusalem;
        the Philippines: Manila; Qatar: Doha; Saudi Arabia: Riyadh; Singapore: Singapore; South Korea: Seoul;
        Sri Lanka: Sri Jayawardenepura Kotte; Syria: Damascus; Taiwan: Taipei; Tajikistan: Dushanbe; Thailand: Bangkok;
        Timor-Leste: Dili; Turkmenistan: Ashgabat; the United Arab Emirates: Abu Dhabi; Uzbekistan: Tashkent;
        Vietnam: Hanoi; Yemen: Sanaa
    """,
    "Europe": """
        Albania: Tirana; Andorra: Andorra la Vella; Austria: Vienna; Belarus: Minsk; Belgium: Brussels;
        Bosnia and Herzegovina: Sarajevo; Bulgaria: Sofia; Croatia: Zagreb; the Czech Republic: Prague;
        Denmark: Copenhagen; Estonia: Tallinn; Finland: Helsinki; France: Paris; Germany: Berlin; Greece: Athens;
        Hungary: Budapest; Iceland: Reykjavík; Ireland: Dublin; Italy: Rome; Kosovo: Pristina; Latvia: Riga;
        Liechtenstein: Vaduz; Lithuania: Vilnius; Luxembourg: Luxembourg City; Malta: Valletta; Moldova: Chișinău;
        Monaco: Monaco; Montenegro: Podgorica; the Netherlands: Amsterdam; North Macedonia: Skopje; Norway: Oslo;
        Poland: Warsaw; Portugal: Lisbon; Romania: Bucharest; San Marino: San Marino; Serbia: Belgrade;
        Slovakia: Bratislava; Slovenia: Ljubljana; Spain: Madrid; Sweden: Stockholm; Switzerland: Bern; Ukraine: Kyiv;
        the United Kingdom: London; Vatican City: Vatican City
    """,
    NO_SINGLE_CONTINENT: """
        Armenia: Yerevan; Azerbaijan: Baku; Cyprus: Nicosia; Georgia: Tbilisi; Kazakhstan: Astana; Russia: Moscow;
        Turkey: Ankara
    """,
    "North America": """
        Antigua and Barbuda: St. John's; the Bahamas: Nassau; Barbados: Bridgetown; Belize: Belmopan; Canada: Ottawa;
        Costa Rica: San José; Cuba: Havana; Dominica: Roseau; the Dominican Republic: Santo Domingo;
        El Salvador: San Salvador; Grenada: St. George's; Guatemala: Guatemala City; Haiti: Port-au-Prince;
        Honduras: Tegucigalpa; Jamaica: Kingston; Mexico: Mexico City; Nicaragua: Managua; Panama: Panama City;
        Saint Kitts and Nevis: Basseterre; Saint Lucia: Castries; Saint Vincent and the Grenadines: Kingstown;
        Trinidad and Tobago: Port of Spain; the United States: Washington, D.C.
    """,
    "South America": """
        Argentina: Buenos Aires; Bolivia: Sucre; Brazil: Brasília; Chile: Santiago; Colombia: Bogotá; Ecuador: Quito;
        Guyana: Georgetown; Paraguay: Asunción; Peru: Lima; Suriname: Paramaribo; Uruguay: Montevideo;
        Venezuela: Caracas
    """,
    "Oceania": """
        Australia: Canberra; Fiji: Suva; Kiribati: South Tarawa; the Marshall Islands: Majuro;
        the Federated States of Micronesia: Palikir; Nauru: Yaren; New Zealand: Wellington; Palau: Ngerulmud;
        Papua New Guinea: Port Moresby; Samoa: Apia; the Solomon Islands: Honiara; Tonga: Nuku'alofa; Tuvalu: Funafuti;
        Vanuatu: Port Vila
    """,
}


def parse_pairs(text: str) -> list[tuple[str, str]]:
    """Read `"a: b; c: d"`, over any number of lines, as `[("a", "b"), ("c", "d")]`."""
    pairs = []
    for entry in " ".join(text.split()).split("; "):
        left, right = entry.split(": ")
        pairs.append((left, right))
    return pairs


CAPITALS: dict[str, str] = {
    state: capital for states in STATES_BY_CONTINENT.values() for state, capital in parse_pairs(states)
}
CONTINENTS: dict[str, str] = {
    state: continent
    for continent, states in STATES_BY_CONTINENT.items()
    if continent != NO_SINGLE_CONTINENT
    for state, _ in parse_pairs(states)
}
