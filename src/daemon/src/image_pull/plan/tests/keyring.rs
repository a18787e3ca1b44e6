use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use serde_json::json;

use super::super::keyring::{Error, HelpersIgnored, Keyring, TYPE_CFG, TYPE_JSON};

/// Adds a Secret of that type with one key.
fn add(ring: &mut Keyring, type_: &str, entry: &str, value: &str) -> Result<Option<HelpersIgnored>, Error> {
    ring.add_secret(type_, |key| (key == entry).then_some(value.as_bytes()))
}

fn add_json(ring: &mut Keyring, config: &serde_json::Value) {
    add(ring, TYPE_JSON, ".dockerconfigjson", &config.to_string()).unwrap();
}

/// A keyring with a user per registry; the user has the registry's name.
fn keyring_for(registries: &[&str]) -> Keyring {
    let auths: serde_json::Map<_, _> = registries
        .iter()
        .map(|r| {
            (
                (*r).to_owned(),
                json!({"auth": STANDARD.encode(format!("{r}:p"))}),
            )
        })
        .collect();
    // A colon would end the user name.
    let text = json!({ "auths": auths }).to_string();
    let mut ring = Keyring::default();
    ring.add_config_json(text.as_bytes(), "file").unwrap();
    ring
}

fn users(ring: &Keyring, repository: &str) -> Vec<String> {
    ring.lookup(repository).into_iter().map(|c| c.username).collect()
}

#[test]
fn most_specific_registry_entry_comes_first() {
    let ring = keyring_for(&["quay.io", "quay.io/a", "quay.io/a/b", "quay.io/z", "gcr.io"]);
    assert_eq!(
        users(&ring, "quay.io/a/b/c"),
        ["quay.io/a/b", "quay.io/a", "quay.io"]
    );
    assert_eq!(users(&ring, "quay.io/x"), ["quay.io"]);
    assert!(users(&ring, "ghcr.io/x").is_empty());
}

#[test]
fn wildcard_matches_one_domain_part() {
    let ring = keyring_for(&["*.example.com", "prefix*.example.org/team"]);
    assert_eq!(users(&ring, "a.example.com/x").len(), 1);
    assert!(users(&ring, "a.b.example.com/x").is_empty());
    assert!(users(&ring, "example.com/x").is_empty());
    assert_eq!(users(&ring, "prefix-1.example.org/team/x").len(), 1);
    assert!(users(&ring, "prefix-1.example.org/other/x").is_empty());
}

#[test]
fn registry_port_must_match() {
    let mut ring = Keyring::default();
    let auths = json!({"auths": {"host:5000": {"username": "u", "password": "p"}}});
    add_json(&mut ring, &auths);
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
        add_json(&mut ring, &auths);
        assert_eq!(users(&ring, "docker.io/library/nginx"), ["hub"], "{written}");
        assert!(users(&ring, "quay.io/x").is_empty());
    }
    assert_eq!(
        users(&keyring_for(&["docker.io/a", "index.docker.io"]), "docker.io/a/b"),
        ["docker.io/a"]
    );
}

#[test]
fn both_pull_secret_types_are_read_in_order() {
    let mut ring = Keyring::default();
    let first = json!({"quay.io": {"username": "first", "password": "p"}});
    let second = json!({"auths": {"https://quay.io": {"auth": STANDARD.encode("second:p:with:colons")}}});
    add(&mut ring, TYPE_CFG, ".dockercfg", &first.to_string()).unwrap();
    add_json(&mut ring, &second);
    let found = ring.lookup("quay.io/x");
    assert_eq!(
        found.iter().map(|c| c.username.as_str()).collect::<Vec<_>>(),
        ["first", "second"]
    );
    assert_eq!(found[1].password, "p:with:colons");
}

#[test]
fn pull_secret_errors_do_not_quote_its_content() {
    let parse_error = |type_: &str, entry: &str, value: &str| {
        add(&mut Keyring::default(), type_, entry, value).unwrap_err()
    };
    assert_eq!(
        parse_error("Opaque", "a", "b"),
        Error::UnsupportedType {
            found: "Opaque".to_owned()
        }
    );
    assert!(matches!(
        parse_error(TYPE_JSON, "wrong", "{}"),
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
        let message = parse_error(type_, entry, value).to_string();
        assert!(
            !message.contains("s3cret") && !message.contains("czNjcmV0"),
            "{message}"
        );
        assert!(message.contains(entry) || message.contains("\"r\""), "{message}");
    }
}

/// Whether credentials for `registry` are used for `repository`.
fn is_used_for(registry: &str, repository: &str) -> bool {
    let mut ring = Keyring::default();
    add_json(
        &mut ring,
        &json!({"auths": {registry: {"username": "u", "password": "p"}}}),
    );
    !ring.lookup(repository).is_empty()
}

/// The results are kubelet's (`Add` and `URLsMatchStr` in pkg/credentialprovider/keyring.go of Kubernetes 1.34), but
/// for the last one: kubelet takes the brackets of an IPv6 host without port for a set of characters.
#[test]
fn registries_match_as_in_kubelet() {
    for (registry, repository, expected) in [
        ("quay.io", "quay.io/a", true),
        ("https://quay.io", "quay.io/a", true),
        ("http://quay.io/", "quay.io/a", true),
        ("https://quay.io/v1/", "quay.io/a", true),
        ("quay.io/v2/", "quay.io/a", true),
        ("quay.io/v1", "quay.io/a", false),
        ("quay.io/v1", "quay.io/v1/a", true),
        ("quay.io/v1/team", "quay.io/team/a", true),
        ("quay.io/team", "quay.io/team-secret/a", true),
        ("*.quay.io", "a.quay.io/x", true),
        ("*.quay.io", "a.b.quay.io/x", false),
        ("*.quay.io", "quay.io/x", false),
        ("*", "localhost/x", true),
        ("*", "quay.io/x", false),
        ("*.*", "quay.io/x", true),
        ("q*y.io", "quay.io/x", true),
        ("q*y*.io", "quay.io/x", true),
        ("**.io", "quay.io/x", true),
        ("*a*a*b.io", "aaaaab.io/x", true),
        ("*a*a*b.io", "aaaaa.io/x", false),
        ("qua?.io", "quay.io/x", false),
        ("quay?.io", "quay/x", true),
        ("quay.io?x=1", "quay.io/x", true),
        ("quay.io#x", "quay.io/x", true),
        ("[q]uay.io", "quay.io/x", false),
        ("q[a-z]ay.io", "quay.io/x", false),
        ("qu\\ay.io", "quay.io/x", false),
        ("host:5000", "host:5000/x", true),
        ("host:5000", "host:5001/x", false),
        ("host:*", "host:5000/x", false),
        ("*:5000", "host:5000/x", true),
        ("host:", "host/x", true),
        ("host:5000/a", "host:5000/a/b", true),
        ("[::1]:5000", "[::1]:5000/x", true),
        ("[fd00::*]:5000", "[fd00::1]:5000/x", false),
        ("user@quay.io", "quay.io/x", true),
        ("user:pw@quay.io", "quay.io/x", true),
        ("QUAY.io", "quay.io/x", false),
        ("quay.io/*", "quay.io/a", false),
        ("quay io", "quay.io/x", false),
        ("quay%2eio", "quay.io/x", false),
        ("", "quay.io/x", false),
        ("/team", "quay.io/team", false),
        ("https://", "quay.io/x", false),
        ("ftp://quay.io", "quay.io/x", false),
        ("quay.io//a", "quay.io//a", true),
        ("*.io", "quay.io/x", true),
        ("quay.*", "quay.io/x", true),
        ("[::1]", "[::1]/x", true),
    ] {
        assert_eq!(
            is_used_for(registry, repository),
            expected,
            "{registry:?} for {repository:?}"
        );
    }
}

#[test]
fn docker_config_is_parsed_like_go() {
    for (config, expected) in [
        (r#"{"auths": null}"#, None),
        ("null", None),
        (r#"{"auths": {"r.test": null}}"#, None),
        (
            r#"{"auths": {"r.test": {"username": null, "password": "p"}}}"#,
            Some(("", "p")),
        ),
        (
            r#"{"Auths": {"r.test": {"UserName": "u", "Password": "p", "email": 5}}}"#,
            Some(("u", "p")),
        ),
        (
            r#"{"auths": {"r.test": {"username": "a", "username": "b", "username": null}}}"#,
            Some(("b", "")),
        ),
    ] {
        let mut ring = Keyring::default();
        add(&mut ring, TYPE_JSON, ".dockerconfigjson", config).unwrap();
        let found = ring.lookup("r.test/x");
        let found = found.first().map(|c| (c.username.as_str(), c.password.as_str()));
        assert_eq!(found, expected, "{config}");
    }
}

#[test]
fn credential_helpers_are_ignored_with_a_warning() {
    let mut ring = Keyring::default();
    let config = json!({"auths": {"https://index.docker.io/v1/": {}}, "credsStore": "desktop"});
    let warning = add(&mut ring, TYPE_JSON, ".dockerconfigjson", &config.to_string());
    assert_eq!(warning, Ok(Some(HelpersIgnored)));
    assert!(ring.lookup("docker.io/library/nginx").is_empty());
    let config = json!({"credHelpers": {}, "credsStore": ""});
    let warning = add(&mut ring, TYPE_JSON, ".dockerconfigjson", &config.to_string());
    assert_eq!(warning, Ok(None));
}

/// They may be as large as a Secret, and take no more memory than that, and no stack.
#[test]
fn credential_helpers_are_not_parsed() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let many = format!("[{}null]", r#"{"":0},"#.repeat(100_000));
    for (helpers, some) in [
        (deep.clone(), false),
        (many.clone(), false),
        (format!(r#"{{"a":{deep},"b":{many}}}"#), true),
        ("{ }".to_owned(), false),
        ("null".to_owned(), false),
        (r#"  "desktop""#.to_owned(), true),
    ] {
        let config = format!(r#"{{"credHelpers":{helpers}}}"#);
        let named = Keyring::default()
            .add_config_json(config.as_bytes(), ".dockerconfigjson")
            .unwrap();
        assert_eq!(named.is_some(), some, "{helpers:.40}");
    }
}

#[test]
fn docker_config_entries_are_bounded() {
    let config = |n: usize| {
        let auths: serde_json::Map<_, _> = (0..n)
            .map(|n| (format!("r{n}.test"), json!({"username": "u"})))
            .collect();
        json!({ "auths": auths }).to_string()
    };
    let mut ring = Keyring::default();
    assert!(add(&mut ring, TYPE_JSON, ".dockerconfigjson", &config(1000)).is_ok());
    assert_eq!(ring.lookup("r999.test/x").len(), 1);
    let mut ring = Keyring::default();
    let error = add(&mut ring, TYPE_JSON, ".dockerconfigjson", &config(1001)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains(".dockerconfigjson has more than 1000 entries"),
        "{error}"
    );
    assert!(ring.lookup("r0.test/x").is_empty());
    assert!(is_used_for(&"*".repeat(512), "host/x"));
    assert!(!is_used_for(&"*".repeat(513), "host/x"));
}

/// Whether the text matches, by checking each pair of positions once.
fn glob_by_table(pattern: &[u8], text: &[u8]) -> bool {
    let mut row: Vec<bool> = (0..=text.len()).map(|n| n == 0).collect();
    for p in pattern {
        let mut next = vec![*p == b'*' && row[0]];
        for (n, t) in text.iter().enumerate() {
            next.push(if *p == b'*' {
                row[n + 1] || next[n]
            } else {
                row[n] && p == t
            });
        }
        row = next;
    }
    row[text.len()]
}

proptest! {
    /// Stars match as a table of all positions does, however many there are: with backtracking, forty stars against two
    /// hundred letters would never finish.
    #[test]
    fn wildcards_match_in_bounded_steps(pattern in "[*a]{1,40}b?", text in "a{0,200}b?x?") {
        let expected = glob_by_table(pattern.as_bytes(), text.as_bytes());
        prop_assert_eq!(is_used_for(&pattern, &format!("{text}/x")), expected);
    }

    /// Whatever a Secret contains, parsing it ends.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), repository in "[a-z.:/*]{0,30}") {
        let mut ring = Keyring::default();
        let _ = ring.add_secret(TYPE_JSON, |_| Some(&bytes));
        let _ = ring.lookup(&repository);
    }

    /// An entry for a host matches everything on it, and nothing elsewhere.
    #[test]
    fn registry_host_covers_its_paths_only(host in "[a-z]{1,5}\\.[a-z]{2,3}", other in "[a-z]{1,5}\\.[a-z]{2,3}", path in "[a-z]{1,5}(/[a-z]{1,5})?") {
        let ring = keyring_for(&[&host]);
        prop_assert_eq!(users(&ring, &format!("{host}/{path}")).len(), 1);
        prop_assert_eq!(users(&ring, &format!("{other}/{path}")).len(), usize::from(host == other));
    }
}
