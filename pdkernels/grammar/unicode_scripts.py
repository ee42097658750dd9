r"""The characters of scripts for patterns, ``\p{Script=Greek}``: the thirty that most texts are written in, as ranges of
hexadecimal numbers. Those of several scripts, such as full stops, are in none.

Source: Unicode Character Database 17.0, Scripts.txt; short names of PropertyValueAliases.txt.
"""

from __future__ import annotations

from functools import cache

from pdkernels.grammar.language import Ranges

_SCRIPTS: dict[tuple[str, str], str] = {
    ("Arabic", "Arab"): (
        "600-604 606-60b 60d-61a 61c-61e 620-63f 641-64a 656-66f 671-6dc 6de-6ff 750-77f 870-891 897-8e1 "
        "8e3-8ff fb50-fd3d fd40-fdcf fdf0-fdff fe70-fe74 fe76-fefc 10e60-10e7e 10ec2-10ec7 10ec9-10eee "
        "10ef0-10eff 1ee00-1ee03 1ee05-1ee1f 1ee21-1ee22 1ee24 1ee27 1ee29-1ee32 1ee34-1ee37 1ee39 1ee3b "
        "1ee42 1ee47 1ee49 1ee4b 1ee4d-1ee4f 1ee51-1ee52 1ee54 1ee57 1ee59 1ee5b 1ee5d 1ee5f 1ee61-1ee62 "
        "1ee64 1ee67-1ee6a 1ee6c-1ee72 1ee74-1ee77 1ee79-1ee7c 1ee7e 1ee80-1ee89 1ee8b-1ee9b 1eea1-1eea3 "
        "1eea5-1eea9 1eeab-1eebb 1eef0-1eef1"
    ),
    ("Armenian", "Armn"): ("531-556 558-58f fb13-fb17"),
    ("Bengali", "Beng"): (
        "980-983 985-98c 98f-990 993-9a8 9aa-9b0 9b2 9b6-9b9 9bc-9c4 9c7-9c8 9cb-9ce 9d7 9dc-9dd 9df-9e3 "
        "9e6-9fe 11df0-11df1"
    ),
    ("Bopomofo", "Bopo"): ("2ea-2eb 3105-312f 31a0-31bf"),
    ("Cherokee", "Cher"): ("13a0-13f5 13f8-13fd ab70-abbf"),
    ("Cyrillic", "Cyrl"): ("400-484 487-52f 1c80-1c8a 1d2b 1d78 2de0-2dff a640-a69f fe2e-fe2f 1e030-1e06d 1e08f"),
    ("Devanagari", "Deva"): ("900-950 955-963 966-97f a8e0-a8ff 11b00-11b0a"),
    ("Ethiopic", "Ethi"): (
        "1200-1248 124a-124d 1250-1256 1258 125a-125d 1260-1288 128a-128d 1290-12b0 12b2-12b5 12b8-12be 12c0 "
        "12c2-12c5 12c8-12d6 12d8-1310 1312-1315 1318-135a 135d-137c 1380-1399 2d80-2d96 2da0-2da6 2da8-2dae "
        "2db0-2db6 2db8-2dbe 2dc0-2dc6 2dc8-2dce 2dd0-2dd6 2dd8-2dde ab01-ab06 ab09-ab0e ab11-ab16 ab20-ab26 "
        "ab28-ab2e 1e7e0-1e7e6 1e7e8-1e7eb 1e7ed-1e7ee 1e7f0-1e7fe"
    ),
    ("Georgian", "Geor"): ("10a0-10c5 10c7 10cd 10d0-10fa 10fc-10ff 1c90-1cba 1cbd-1cbf 2d00-2d25 2d27 2d2d"),
    ("Greek", "Grek"): (
        "370-373 375-377 37a-37d 37f 384 386 388-38a 38c 38e-3a1 3a3-3e1 3f0-3ff 1d26-1d2a 1d5d-1d61 "
        "1d66-1d6a 1dbf 1f00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
        "1fb6-1fc4 1fc6-1fd3 1fd6-1fdb 1fdd-1fef 1ff2-1ff4 1ff6-1ffe 2126 ab65 10140-1018e 101a0 1d200-1d245 "
        "1dff3-1dff4"
    ),
    ("Gujarati", "Gujr"): (
        "a81-a83 a85-a8d a8f-a91 a93-aa8 aaa-ab0 ab2-ab3 ab5-ab9 abc-ac5 ac7-ac9 acb-acd ad0 ae0-ae3 ae6-af1 af9-aff"
    ),
    ("Gurmukhi", "Guru"): (
        "a01-a03 a05-a0a a0f-a10 a13-a28 a2a-a30 a32-a33 a35-a36 a38-a39 a3c a3e-a42 a47-a48 a4b-a4d a51 "
        "a59-a5c a5e a66-a76"
    ),
    ("Han", "Hani"): (
        "2e80-2e99 2e9b-2ef3 2f00-2fd5 3005 3007 3021-3029 3038-303b 3400-4dbf 4e00-9fff f900-fa6d fa70-fad9 "
        "16fe2-16fe3 16ff0-16ff6 20000-2a6df 2a700-2b81e 2b820-2cead 2ceb0-2ebe0 2ebf0-2ee5d 2f800-2fa1d "
        "30000-3134a 31350-33479"
    ),
    ("Hangul", "Hang"): (
        "1100-11ff 302e-302f 3131-318e 3200-321e 3260-327e a960-a97c ac00-d7a3 d7b0-d7c6 d7cb-d7fb ffa0-ffbe "
        "ffc2-ffc7 ffca-ffcf ffd2-ffd7 ffda-ffdc"
    ),
    ("Hebrew", "Hebr"): ("591-5c9 5d0-5ea 5ef-5f4 fb1d-fb36 fb38-fb3c fb3e fb40-fb41 fb43-fb44 fb46-fb4f"),
    ("Hiragana", "Hira"): ("3041-3096 309d-309f 1b001-1b11f 1b123 1b132 1b150-1b152 1f200"),
    ("Kannada", "Knda"): (
        "c80-c8c c8e-c90 c92-ca8 caa-cb3 cb5-cb9 cbc-cc4 cc6-cc8 cca-ccd cd5-cd6 cdc-cde ce0-ce3 ce6-cef cf1-cf3"
    ),
    ("Katakana", "Kana"): (
        "30a1-30fa 30fd-30ff 31f0-31ff 32d0-32fe 3300-3357 ff66-ff6f ff71-ff9d 1aff0-1aff3 1aff5-1affb "
        "1affd-1affe 1b000 1b120-1b122 1b124-1b128 1b155 1b164-1b168"
    ),
    ("Khmer", "Khmr"): ("1780-17dd 17e0-17e9 17f0-17f9 19e0-19ff"),
    ("Lao", "Laoo"): ("e81-e82 e84 e86-e8a e8c-ea3 ea5 ea7-ebd ec0-ec4 ec6 ec8-ece ed0-ed9 edc-edf"),
    ("Latin", "Latn"): (
        "41-5a 61-7a aa ba c0-d6 d8-f6 f8-2b8 2e0-2e4 1d00-1d25 1d2c-1d5c 1d62-1d65 1d6b-1d77 1d79-1dbe "
        "1e00-1eff 2071 207f 2090-209f 212a-212b 2132 214e 2160-2188 2c60-2c7f a722-a787 a78b-a7dd a7e2 "
        "a7f1-a7ff ab30-ab5a ab5c-ab64 ab66-ab69 ab6c-ab6d fb00-fb06 ff21-ff3a ff41-ff5a 10780-10785 "
        "10787-107b0 107b2-107bf 1df00-1df81 1df90-1df96 1dfcd-1dff2 1dff5-1dfff"
    ),
    ("Malayalam", "Mlym"): ("d00-d0c d0e-d10 d12-d44 d46-d48 d4a-d4f d54-d63 d66-d7f"),
    ("Mongolian", "Mong"): ("1800-1801 1804 1806-1819 1820-1878 1880-18aa 11660-1166c"),
    ("Myanmar", "Mymr"): ("1000-109f a9e0-a9fe aa60-aa7f 116d0-116e3"),
    ("Sinhala", "Sinh"): (
        "d81-d83 d85-d96 d9a-db1 db3-dbb dbd dc0-dc6 dca dcf-dd4 dd6 dd8-ddf de6-def df2-df4 111e1-111f4"
    ),
    ("Tamil", "Taml"): (
        "b82-b83 b85-b8a b8e-b90 b92-b95 b99-b9a b9c b9e-b9f ba3-ba4 ba8-baa bae-bb9 bbe-bc2 bc6-bc8 bca-bcd "
        "bd0 bd7 be6-bfa 11fc0-11ff1 11fff"
    ),
    ("Telugu", "Telu"): (
        "c00-c0c c0e-c10 c12-c28 c2a-c39 c3c-c44 c46-c48 c4a-c4d c55-c56 c58-c5a c5c-c5d c60-c63 c66-c6f c77-c7f"
    ),
    ("Thaana", "Thaa"): ("780-7b1"),
    ("Thai", "Thai"): ("e01-e3a e40-e5b"),
    ("Tibetan", "Tibt"): ("f00-f47 f49-f6c f71-f97 f99-fbc fbe-fcc fce-fd4 fd9-fda"),
}
"""By their long and short names."""


@cache
def ranges_of(script: str) -> Ranges | None:
    """The characters of a script, by its long or its short name; None for one that is not known.

    >>> ranges_of("Hira")[0] == (0x3041, 0x3096), ranges_of("Klingon")
    (True, None)
    """
    ranges = next((text for names, text in _SCRIPTS.items() if script in names), None)
    if ranges is None:
        return None
    bounds = (bound.split("-") for bound in ranges.split())
    return tuple((int(bound[0], 16), int(bound[-1], 16)) for bound in bounds)


def known() -> str:
    """The names of the scripts that are known, for messages."""
    return ", ".join(name for name, _ in _SCRIPTS)
