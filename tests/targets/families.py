"""Model types of transformers, grouped by the family that users know; best-known families first."""

from __future__ import annotations

# Family -> model types in the causal-LM and image-text mappings of transformers.
FAMILIES: dict[str, str] = {
    "Qwen3": "qwen3 qwen3_moe",
    "Llama": "llama internlm3 iquestcoder exaone",
    "Gemma 4": (
        "gemma4 gemma4_text gemma4_unified gemma4_unified_text gemma4_assistant "
        "gemma4_unified_assistant"
    ),
    "Qwen3.5": "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
    "Qwen3-VL": "qwen3_vl qwen3_vl_moe qwen3_omni_moe_thinker",
    "Qwen2, Qwen2.5": "qwen2 qwen2_moe",
    "gpt-oss": "gpt_oss",
    "Qwen2-VL, Qwen2.5-VL": "qwen2_vl qwen2_5_vl qwen2_5_omni_thinker",
    "Gemma 3": "gemma3 gemma3_text gemma3n gemma3n_text shieldgemma2",
    "Mistral, Ministral": "mistral mixtral ministral ministral3",
    "Mistral Small, Pixtral": "mistral3 mistral4 mistral_large4",
    "DeepSeek": "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 sarvam_mla",
    "Phi": "phi phi3 phimoe phi4_multimodal",
    "GLM": "glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa sarvam_moe",
    "GLM-V": "glm4v glm4v_moe glm46v glmga glm5_next glm_ocr",
    "LFM": "lfm2_vl lfm2 lfm2_moe lfm3 lfm3_vl",
    "Nemotron": "nemotron_h nemotron nemotron_h_omni",
    "Granite": (
        "granite granitemoe granitemoeshared granitemoehybrid granite_swa granitemoe_swa "
        "granite4_vision granite_docling"
    ),
    "Falcon": "falcon falcon_h1 falcon_mamba",
    "SmolLM, SmolVLM": "smollm3 smolvlm idefics3",
    "OLMo": "olmo olmo2 olmo3 olmo_hybrid olmoe flex_olmo molmo2",
    "Qwen3-Next": "qwen3_next qwen4_exp qwen4_exp_text",
    "Kimi": "kimi_k25 kimi_linear",
    "MiniMax": "minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text",
    "LLaVA": (
        "llava llava_next llava_next_video llava_onevision video_llava video_llama_3 vipllava"
    ),
    "InternVL": "internvl qianfan_ocr",
    "PaliGemma": "paligemma pi0",
    "Command, Aya": (
        "cohere cohere2 cohere2_moe cohere2_vision cohere_compass cohere_compass_text aya_vision"
    ),
    "EXAONE": "exaone4 exaone4_5 exaone_moe",
    "Gemma, Gemma 2": "gemma gemma2 vaultgemma recurrent_gemma diffusion_gemma",
    "GPT-2": "gpt2 gpt-sw3 gpt_bigcode starcoder2",
    "GPT-NeoX, GPT-J": "gpt_neox gpt_neox_japanese gptj gpt_neo codegen",
    "OPT, BLOOM": "opt bloom xglm mpt",
    "Hunyuan": "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hy_v4_vl",
    "Ernie": "ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe paddleocr_vl",
    "Mamba": "mamba mamba2 rwkv xlstm",
    "Jamba, Zamba, Bamba": "jamba zamba zamba2 bamba zaya",
    "BERT as a decoder": (
        "bert bert-generation big_bird camembert data2vec-text electra megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
    ),
    "BART as a decoder": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
        "prophetnet trocr whisper"
    ),
    "MiniCPM": "minicpm3 minicpmv4_6 minicpmv4_7 minicpm_ocr",
    "Llama 4": "llama4 llama4_text",
    "Llama 3.2 Vision": "mllama",
    "BLIP": "blip blip-2 instructblip instructblipvideo",
    "Idefics": "idefics idefics2",
    "Kosmos": "kosmos-2 kosmos-2.5",
    "Florence-2, UDOP, Pix2Struct": (
        "florence2 udop pix2struct t5gemma2 vision-encoder-decoder pp_formulanet"
    ),
    "OCR models": "deepseek_ocr2 got_ocr2 pp_chart2table lighton_ocr unlimited_ocr",
    "DeepSeek-VL, Janus": "deepseek_vl deepseek_vl_hybrid janus",
    "Ling, Ring": "bailing_hybrid",
    "GIT, Fuyu": "git fuyu",
    "Chameleon, Emu3": "chameleon emu3",
    "MusicGen, Moshi": "musicgen musicgen_melody moshi moss_transcribe_diarize",
    "GPT-1, CTRL, XLM, XLNet, Reformer": "openai-gpt ctrl xlm xlnet reformer cpmant",
    "HyperCLOVA X": "hyperclovax hyperclovax_vision_v2",
    "Inkling": "inkling_text inkling_mm_model inkling2 inkling2_text "
    "inkling2_loop inkling2_loop_text",
    "A.X": "axk1 axk2",
    "dots": "dots1 dots3_note dots3_note_text",
    "Cosmos": "cosmos3_edge cosmos3_omni",
    "Aria": "aria aria_text",
    "Muse": "muse_glimmer muse_spark",
    "Seed-OSS": "seed_oss",
    "Apertus": "apertus apertus1p5 apertus1p5_text",
    "Helium": "helium",
    "AFM, Trinity": "arcee afmoe",
    "StableLM": "stablelm",
    "Persimmon": "persimmon",
    "DBRX": "dbrx",
    "BitNet": "bitnet",
    "MiMo": "mimo_v2_flash",
    "LongCat": "longcat_flash",
    "Youtu": "youtu",
    "Jais": "jais2",
    "Solar": "solar_open",
    "Step 3": "step3p7",
    "Code World Model": "cwm",
    "Mellum, Laguna": "mellum laguna",
    "JetMoe": "jetmoe",
    "BioGPT": "biogpt",
    "Byte Latent Transformer": "blt",
    "Doge": "doge",
    "DiffLlama": "diffllama",
    "ModernBERT decoder": "modernbert-decoder",
    "nanochat": "nanochat",
    "HRM": "hrm_text",
    "Dory, LaraMini": "dory lara_mini",
    "Perception LM, FastVLM, Ovis": "perception_lm fast_vlm ovis2",
    "Evolla": "evolla",
    "Kolibri, Flint, Beam": "kolibri1 flint beam",
}


def family_of(kind: str) -> str:
    """Return the family of a model type, or the model type itself if it has no family."""
    return next((name for name, kinds in FAMILIES.items() if kind in kinds.split()), kind)
