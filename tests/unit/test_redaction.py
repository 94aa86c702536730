"""Secrets in free text and in settings are masked, and what only looks like one is not."""

import time
from dataclasses import fields

import pytest

from trl_ppo_ext import PPOConfig
from trl_ppo_ext.redaction import is_secret, redacted, without_keys, without_secrets

# put together here, because scanners of repositories would take whole ones for secrets
MIXED = "aZ3kP9qLm2XvB7tRw5Yc8Ns4Dq6"  # letters and digits
LOWER = MIXED.lower()
UPPER = MIXED.upper()
HEX = "3f9a1c7e5b2d8064" * 2
DIGITS = "4820193756"
SLASHED = "wJalrXUtn/K7MDENG+bPxRfiCYzz0q1LmE/KEYab"
BASE64 = "dXNlcjpodW50ZXIy"  # user:hunter2
PEM = (
    "-----BEGIN {0}PRIVATE KEY-----\n"
    + "MIIEpAIBAAKCAQEA\nhunter2+x/\n"
    + "-----END {0}PRIVATE KEY-----"
)

SHAPES = {  # texts by the part that must not be left
    "AKIA": [
        f"AWS: The access key AKIA{UPPER[:16]} is not active",
    ],
    UPPER[:16]: [f"Credential=ASIA{UPPER[:16]}/20260101/us-east-1"],
    "K7MDENG": [
        f"aws_secret_access_key = {SLASHED}",
        f"AWS_SESSION_TOKEN={SLASHED}==",
        f'{{"SecretAccessKey": "{SLASHED}", "Region": "x"}}',
        f"https://b.s3.amazonaws.com/k?X-Amz-Expires=60&X-Amz-Signature={SLASHED}",
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SLASHED}==;EndpointSuffix=core",
        f"Endpoint=sb://a/;SharedAccessKeyName=root;SharedAccessKey={SLASHED}=",
        f"https://a.blob.core.windows.net/c?sv=2026&sig={SLASHED}",
    ],
    HEX: [
        f"Ocp-Apim-Subscription-Key: {HEX}",
        f"X-Api-Key: {HEX}",
        f"WANDB_API_KEY={HEX}",
        f"Twilio SK{HEX} was revoked",
        f"databricks dapi{HEX} expired",
        f"mailchimp {HEX}-us12",
        f"dop_v1_{HEX}{HEX}",
        f"sbp_{HEX}12345678",
        f'(b"x-api-key", b"{HEX}")',
        f"('authorization', '{HEX}')",
    ],
    MIXED[8:20]: [
        f"AIza{MIXED}Sy{MIXED[:6]}: API key not valid",
        f"invalid_grant ya29.{MIXED}_x",
        f"GOCSPX-{MIXED}",
        f"remote: ghp_{MIXED}{MIXED[:9]} has no access",
        f"github_pat_11{MIXED}_{MIXED}",
        f"https://x-access-token:gho_{MIXED}@github.com/a/b.git",
        f"glpat-{MIXED[:20]}",
        f"Invalid user token hf_{MIXED}.",
        f"Incorrect API key provided: sk-{MIXED}.",
        f"sk-proj-{MIXED[:4]}_{MIXED}-x",
        f"sk-ant-api03-{MIXED}-AA",
        f"gsk_{MIXED}",
        f"nvapi-{MIXED}",
        f"xoxb-{DIGITS}-{DIGITS}-{MIXED}",
        f"https://hooks.slack.com/services/T{DIGITS}/B{DIGITS}/{MIXED[:24]}",
        f"sk_live_{MIXED}",
        f"whsec_{MIXED}",
        f"SG.{MIXED[:22]}.{MIXED}{MIXED[:16]}",
        f"https://api.telegram.org/bot{DIGITS}:AA{MIXED}{MIXED[:6]}/getMe",
        f"npm_{MIXED}",
        f"unknown_vendor_{MIXED}",
        f"//registry.npmjs.org/:_authToken={MIXED}",
        f"pypi-AgEIcHlwaS5vcmc{MIXED}",
        f"hvs.{MIXED}",
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{MIXED[:4]}.{MIXED}",
        f"401 for Bearer {MIXED}",
        f"of an unknown kind: {MIXED}",
    ],
    UPPER: [f"identity file: AGE-SECRET-KEY-1{UPPER}{UPPER}"],
    "hunter2": [
        "http://user:hunter2@proxy:3128",
        "could not connect to postgresql://admin:hunter2@db:5432/x",
        "redis://:hunter2@cache:6379/0",
        "mongodb+srv://u:p@hunter2@cluster.example.net",
        PEM.format("RSA "),
        PEM.format("OPENSSH "),
        '{"private_key": "' + PEM.format("").replace("\n", "\\n") + '"}',
        "Server=x;Uid=u;Pwd=hunter2;Database=d",
        "FATAL: host=x user=y password=hunter2 dbname=z",
        'Config(user="u", password="correct horse hunter2", n=1)',
        "db:\n  password: hunter2\n  port: 5432",
        "password := 'hunter2'",
        '"client_secret" => "hunter2"',
        '[db]\npassword = "hunter2"',
        r"body: {\"api_key\": \"hunter2\", \"n\": 2}",
        "{'token': 'hunter2', 'n': 2}",
        "export HF_TOKEN=hunter2",
        "os.environ['DB_PASSWORD'] = 'hunter2'",
        "Client(api_key=SecretStr('hunter2'))",
        "curl -H 'Authorization: Token hunter2x'",
        "PGPASSWORD=hunter2 psql",
        "https://host/a?n=1&access_token=hunter2&m=2",
        "next%3Fapi_key%3Dhunter2",
        "<user>u</user><password>hunter2</password>",
        "run --password hunter2 --n 3",
        "curl -u admin:hunter2 https://host",
        "curl --user admin:hunter2 https://host",
        "machine api.host login admin password hunter2",
        "Cookie: theme=dark; session=hunter2",
    ],
    BASE64: [
        f"Authorization: Basic {BASE64}",
        f"{{'Authorization': 'Basic {BASE64}'}}",
        f"sent Basic {BASE64}= twice",
    ],
}
FREE_TEXT = [(text, secret) for secret, texts in SHAPES.items() for text in texts]


@pytest.mark.parametrize("text, secret", FREE_TEXT, ids=[ascii(text)[:40] for text, _ in FREE_TEXT])
def test_secret_in_free_text_is_masked(text, secret):
    for given in (text, f"The server said: {text}\nTry again.", f'{{"error": "{text}"}}'):
        masked = redacted(given)
        assert secret not in masked and "***" in masked, masked
        assert redacted(masked) == masked


NAMES = (
    "api_key apikey API-KEY openaiApiKey token accessToken authtoken refresh_tokens secret "
    "clientSecret password DBPASSWORD passwd pwd pass passcode passphrase credentials auth oauth "
    "bearer private_key privatekey access_key accesskey signing_key connection_string "
    "connectionString dsn cookie session_id jwt otp webhook_url mnemonic github_pat api_key_2"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_setting_with_the_name_of_a_secret_is_masked(name):
    assert "k1" not in str(without_secrets({"a": [{name: "k1"}]}))
    for text in (
        f"{name}=swordfish1",
        f'"{name}": "swordfish1"',
        f"{name}: swordfish1",
        f"x.{name.upper()} = swordfish1",
    ):
        assert "swordfish1" not in redacted(text), text


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 5, max_new_tokens=256, total_tokens=1024 and {'prompt_tokens': 12, "
        "'completion_tokens': 34}",
        "eos_token='</s>' pad_token=<pad> stop_token: 'x9' pad_token_id=0 token_ids=[1, 2]",
        "commit dbe0a9d6c4b1f3e2a7980123456789abcdef0123 of 2026-10-01T12:34:56, "
        "123e4567-e89b-12d3-a456-426614174000",
        "KeyError: 'answer2', and the keys=['a'] of a monkey: banana1, keyboard=qwerty1, "
        "secretary: Anna2, author=Ann",
        "expected token: 5, 3 headers: 3 rows, pass: 12, fail: 3, sort(key=len), key=lambda row: "
        "row.name",
        "The key: always practice. Unexpected token: 'the'. Missing key: 'name'. The password "
        "must have 8 characters.",
        "password is required; password authentication failed for bob; Bearer token required; "
        "Basic authentication",
        "meta-llama/Meta-Llama-3-8B-Instruct, Qwen2ForCausalLM, Qwen/Qwen2.5-0.5B-Instruct, sk-1, "
        "sk-learn-contrib-x",
        "hf_hub_download_with_retries(repo_id='a/b'), npm_config_registry_of_user, "
        "task-based-rewards-of-the-policy",
        "git@github.com:a/b /home/u/ppo-2026-01-02/checkpoint-1000 at "
        "http://h:80/v1/models?limit=5 of me@host.org",
        "password=None, token=True, api_key=<unset>, headers={}",
        "step 100/1000 reward=0.5 kl=0.01 num_tokens=123456789012345678901234",
        "TypeError: guess() got an unexpected keyword argument 'secret'; use guess(number=7)",
    ],
)
def test_text_without_a_secret_is_unchanged(text):
    assert redacted(text) == text


def test_only_the_hub_token_is_named_like_a_secret():
    assert {entry.name for entry in fields(PPOConfig) if is_secret(entry.name)} == {"hub_token"}


def test_keys_of_known_forms_are_masked_and_code_is_not():
    code = "sorted(rows, key=lambda row: row['password']); password = 'x1'"
    assert (
        without_keys(f"{code}; hf_{MIXED}, u:p@x, http://u:p@x")
        == f"{code}; ***, u:p@x, http://***@x"
    )


@pytest.mark.parametrize(
    "part",
    ["://a:", "a" * 20, "key=", "--key ", "eyJ", "a.", "sk-", "-----BEGIN PRIVATE KEY-----", '"'],
)
def test_hostile_text_takes_linear_time(part):
    began = time.process_time()
    redacted(part * (100_000 // len(part)))
    assert time.process_time() - began < 1
