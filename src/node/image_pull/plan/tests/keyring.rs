use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use serde_json::json;

use super::super::keyring::{Error, Keyring, TYPE_CFG, TYPE_JSON};
use super::*;

fn data(entry: &str, value: &serde_json::Value) -> BTreeMap<String, Vec<u8>> {
    [(entry.to_owned(), value.to_string().into_bytes())].into()
}

/// A keyring with a user per registry; the user has the registry's name.
fn ring(registries: &[&str]) -> Keyring {
    let auths: serde_json::Map<_, _> = registries
        .iter()
        .map(|r| {
            (
                (*r).to_owned(),
                json!({"auth": STANDARD.encode(format!("{r}:p"))}),
            )
        })
        .collect();
    // A colon would end the user's name.
    let text = json!({ "auths": auths }).to_string();
    let mut ring = Keyring::default();
    ring.add_config_json(text.as_bytes(), "file").unwrap();
    ring
}

fn users(ring: &Keyring, repository: &str) -> Vec<String> {
    ring.lookup(repository).into_iter().map(|c| c.username).collect()
}

#[test]
fn the_most_specific_entry_comes_first_and_all_that_match_are_kept() {
    let ring = ring(&["quay.io", "quay.io/a", "quay.io/a/b", "quay.io/z", "gcr.io"]);
    assert_eq!(
        users(&ring, "quay.io/a/b/c"),
        ["quay.io/a/b", "quay.io/a", "quay.io"]
    );
    assert_eq!(users(&ring, "quay.io/x"), ["quay.io"]);
    assert!(users(&ring, "ghcr.io/x").is_empty());
}

#[test]
fn a_star_stands_for_a_part_between_dots() {
    let ring = ring(&["*.example.com", "prefix*.example.org/team"]);
    assert_eq!(users(&ring, "a.example.com/x").len(), 1);
    assert!(users(&ring, "a.b.example.com/x").is_empty());
    assert!(users(&ring, "example.com/x").is_empty());
    assert_eq!(users(&ring, "prefix-1.example.org/team/x").len(), 1);
    assert!(users(&ring, "prefix-1.example.org/other/x").is_empty());
}

#[test]
fn the_port_must_be_the_same() {
    let mut ring = Keyring::default();
    let auths = json!({"auths": {"host:5000": {"username": "u", "password": "p"}}});
    ring.add_secret(TYPE_JSON, &data(".dockerconfigjson", &auths))
        .unwrap();
    assert_eq!(users(&ring, "host:5000/x"), ["u"]);
    assert!(users(&ring, "host:5001/x").is_empty() && users(&ring, "host/x").is_empty());
}

#[test]
fn docker_hub_has_a_default_entry() {
    for written in [
        "https://index.docker.io/v1/",
        "index.docker.io",
        "https://index.docker.io/v2/",
    ] {
        let mut ring = Keyring::default();
        let auths = json!({"auths": {written: {"username": "hub", "password": "p"}}});
        ring.add_secret(TYPE_JSON, &data(".dockerconfigjson", &auths))
            .unwrap();
        assert_eq!(users(&ring, "docker.io/library/nginx"), ["hub"], "{written}");
        assert!(users(&ring, "quay.io/x").is_empty());
    }
    assert_eq!(
        users(&ring(&["docker.io/a", "index.docker.io"]), "docker.io/a/b"),
        ["docker.io/a"]
    );
}

#[test]
fn both_types_of_secret_are_read_and_the_order_of_secrets_is_kept() {
    let mut ring = Keyring::default();
    let first = json!({"quay.io": {"username": "first", "password": "p"}});
    let second = json!({"auths": {"https://quay.io": {"auth": STANDARD.encode("second:p:with:colons")}}});
    ring.add_secret(TYPE_CFG, &data(".dockercfg", &first)).unwrap();
    ring.add_secret(TYPE_JSON, &data(".dockerconfigjson", &second))
        .unwrap();
    let found = ring.lookup("quay.io/x");
    assert_eq!(
        found.iter().map(|c| c.username.as_str()).collect::<Vec<_>>(),
        ["first", "second"]
    );
    assert_eq!(found[1].password, "p:with:colons");
}

#[test]
fn what_is_wrong_with_a_secret_is_said_without_its_content() {
    let read = |type_: &str, entry: &str, value: &str| {
        let data = [(entry.to_owned(), value.as_bytes().to_vec())].into();
        Keyring::default().add_secret(type_, &data).unwrap_err()
    };
    assert_eq!(
        read("Opaque", "a", "b"),
        Error::Type {
            found: "Opaque".to_owned()
        }
    );
    assert!(matches!(
        read(TYPE_JSON, "wrong", "{}"),
        Error::NoEntry(".dockerconfigjson")
    ));
    for (type_, entry, value) in [
        (TYPE_JSON, ".dockerconfigjson", "s3cret, not JSON"),
        (TYPE_JSON, ".dockerconfigjson", r#"{"auths": "s3cret"}"#),
        (
            TYPE_JSON,
            ".dockerconfigjson",
            r#"{"auths": {"r": {"auth": "s3cret!"}}}"#,
        ),
        (TYPE_CFG, ".dockercfg", r#"{"r": {"auth": "czNjcmV0"}}"#),
    ] {
        let words = read(type_, entry, value).to_string();
        assert!(
            !words.contains("s3cret") && !words.contains("czNjcmV0"),
            "{words}"
        );
        assert!(words.contains(entry) || words.contains("\"r\""), "{words}");
    }
}

proptest! {
    /// Whatever a secret holds, reading it ends.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), repository in "[a-z.:/*]{0,30}") {
        let mut ring = Keyring::default();
        let data = [(".dockerconfigjson".to_owned(), bytes)].into();
        let _ = ring.add_secret(TYPE_JSON, &data);
        let _ = ring.lookup(&repository);
    }

    /// An entry for a host goes with everything on it, and with nothing elsewhere.
    #[test]
    fn a_host_covers_its_paths_only(host in "[a-z]{1,5}\\.[a-z]{2,3}", other in "[a-z]{1,5}\\.[a-z]{2,3}", path in "[a-z]{1,5}(/[a-z]{1,5})?") {
        let ring = ring(&[&host]);
        prop_assert_eq!(users(&ring, &format!("{host}/{path}")).len(), 1);
        prop_assert_eq!(users(&ring, &format!("{other}/{path}")).len(), usize::from(host == other));
    }
}
