"""A few sentences of our own in many languages: a village by a river, whose people rise early."""

# ruff: noqa: RUF001 - letters of other scripts look like those of English

from __future__ import annotations

# Whose words have combining marks or joiners inside.
MARKED = {
    "Hindi": "नदी के किनारे एक छोटा सा गाँव था। वहाँ के लोग सुबह जल्दी उठते थे और खेतों में काम करते थे।",
    "Bengali": "নদীর ধারে একটি ছোট গ্রাম ছিল। সেখানকার মানুষ ভোরে উঠে মাঠে কাজ করত।",
    "Tamil": "ஆற்றின் கரையில் ஒரு சிறிய கிராமம் இருந்தது. அங்கே மக்கள் காலையில் எழுந்து வயலில் வேலை செய்தார்கள்.",
    "Telugu": "నది ఒడ్డున ఒక చిన్న గ్రామం ఉండేది. అక్కడి ప్రజలు ఉదయాన్నే లేచి పొలంలో పని చేసేవారు.",
    "Thai": "ริมแม่น้ำมีหมู่บ้านเล็ก ๆ แห่งหนึ่ง ผู้คนตื่นแต่เช้าและไปทำงานในทุ่งนา",
    "Lao": "ຢູ່ແຄມແມ່ນ້ຳມີໝູ່ບ້ານນ້ອຍແຫ່ງໜຶ່ງ ຜູ້ຄົນຕື່ນແຕ່ເຊົ້າແລະໄປເຮັດວຽກໃນທົ່ງນາ",
    "Khmer": "នៅមាត់ទន្លេមានភូមិតូចមួយ។ អ្នកភូមិក្រោកពីព្រលឹម ហើយទៅធ្វើការនៅវាលស្រែ។",
    "Burmese": "မြစ်ကမ်းနားမှာ ရွာငယ်လေး တစ်ရွာ ရှိတယ်။ လူတွေက မနက်စောစော ထပြီး လယ်ထဲမှာ အလုပ်လုပ်ကြတယ်။",
    "Hebrew with points": "עַל שְׂפַת הַנָּהָר הָיָה כְּפָר קָטָן. הָאֲנָשִׁים קָמוּ מֻקְדָּם וְעָבְדוּ בַּשָּׂדֶה.",
    "Arabic with vowels": "كَانَتْ قَرْيَةٌ صَغِيرَةٌ عَلَى ضَفَّةِ النَّهْرِ. يَسْتَيْقِظُ النَّاسُ مُبَكِّرًا وَيَعْمَلُونَ فِي الحَقْلِ.",
    "Persian": "کنار رودخانه دهکده‌ای کوچک بود. مردم صبح زود بیدار می‌شدند و به کشتزارهایشان می‌رفتند.",
}
# Whose words have none, or letters that Unicode has in one.
PLAIN = {
    "English": "By the river lay a small village. Its people rose early and worked in the fields. ❤️ 👩‍👧",
    "Russian": "На берегу реки лежала маленькая деревня. Люди вставали рано и работали в поле.",
    "Greek": "Δίπλα στο ποτάμι ήταν ένα μικρό χωριό. Οι άνθρωποι ξυπνούσαν νωρίς και δούλευαν στα χωράφια.",
    "Hebrew": "על שפת הנהר היה כפר קטן. האנשים קמו מוקדם ועבדו בשדה.",
    "Japanese": "川のほとりに小さな村がありました。人々は朝早く起きて、畑で働いていました。",
    "Chinese": "河边有一个小村庄。人们清早起床，到田里干活。",
    "Korean": "강가에 작은 마을이 있었다. 사람들은 아침 일찍 일어나 들에서 일했다.",
}
# Whose letters come apart in NFD.
COMPOSED = {
    "French": "Près de la rivière se trouvait un tout petit hameau où l'été était très léger, à côté des forêts.",
    "Vietnamese": "Bên bờ sông có một ngôi làng nhỏ. Mọi người dậy sớm và làm việc trên đồng ruộng.",
    "Greek": PLAIN["Greek"],
    "Russian": "Мой ёжик, твой чайник, её йогурт и ещё один край.",
    "Korean": PLAIN["Korean"],
}

HINDI = MARKED["Hindi"]
