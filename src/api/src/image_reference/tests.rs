#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

fn parsed(given: &str) -> (String, String, String) {
    let r = ImageReference::parse(given).unwrap();
    (r.familiar_name(), r.tag_or_digest().to_owned(), r.to_string())
}

#[test]
fn valid_references_are_parsed_and_normalized() {
    for (given, name, tag, full) in [
        ("nginx", "nginx", "latest", "docker.io/library/nginx:latest"),
        (
            "nginx:1.27-alpine",
            "nginx",
            "1.27-alpine",
            "docker.io/library/nginx:1.27-alpine",
        ),
        (
            "docker.io/library/nginx",
            "nginx",
            "latest",
            "docker.io/library/nginx:latest",
        ),
        (
            "docker.io/nginx",
            "nginx",
            "latest",
            "docker.io/library/nginx:latest",
        ),
        ("index.docker.io/a/b:c", "a/b", "c", "docker.io/a/b:c"),
        (
            "docker.io/library/a/b",
            "library/a/b",
            "latest",
            "docker.io/library/a/b:latest",
        ),
        ("a/b", "a/b", "latest", "docker.io/a/b:latest"),
        ("quay.io/a/b:v1", "quay.io/a/b", "v1", "quay.io/a/b:v1"),
        ("localhost/a", "localhost/a", "latest", "localhost/a:latest"),
        (
            "127.0.0.1:5000/a:1",
            "127.0.0.1:5000/a",
            "1",
            "127.0.0.1:5000/a:1",
        ),
        ("[::1]:5000/a:1", "[::1]:5000/a", "1", "[::1]:5000/a:1"),
        ("host:5000", "host", "5000", "docker.io/library/host:5000"),
    ] {
        assert_eq!(
            parsed(given),
            (name.to_owned(), tag.to_owned(), full.to_owned()),
            "{given}"
        );
    }
}

#[test]
fn digest_takes_precedence_over_tag() {
    let given = format!("127.0.0.1:5000/a/b:v1@{DIGEST}");
    let full = format!("127.0.0.1:5000/a/b@{DIGEST}");
    assert_eq!(
        parsed(&given),
        ("127.0.0.1:5000/a/b".to_owned(), DIGEST.to_owned(), full.clone())
    );
    assert_eq!(
        ImageReference::from_name_and_tag("127.0.0.1:5000/a/b", DIGEST)
            .unwrap()
            .to_string(),
        full
    );
}

#[test]
fn invalid_references_are_rejected_with_reason() {
    for (given, why) in [
        ("", "empty"),
        ("Nginx", "lower case"),
        ("a//b", "part of the name is empty"),
        ("a/", "part of the name is empty"),
        ("nginx:", "tag is empty"),
        ("nginx:-x", "must not begin"),
        ("nginx:a b", "tag may have"),
        ("ng inx", "name may have"),
        ("a___b", "between letters"),
        ("a..b/c", "host may have"),
        ("x/a._b", "between letters"),
        ("host.io:port/a", "port is not a number"),
        ("[::1/a", "bracket"),
        ("nginx@sha256:12", "wrong length"),
        ("nginx@md5:d41d8cd98f00b204e9800998ecf8427e", "algorithm"),
        ("nginx@", "no algorithm"),
        ("nginx:sha256:12", "tag may have"),
        ("https://example.com/a", "port is not a number"),
    ] {
        let e = ImageReference::parse(given).expect_err(given);
        assert!(e.why.contains(why), "{given}: {e}");
        assert!(e.to_string().contains(&format!("{given:?}")), "{e}");
    }
    let id = "a".repeat(64);
    assert!(ImageReference::parse(&id).unwrap_err().why.contains("image ID"));
    assert!(
        ImageReference::parse(&format!("a/{}", "b".repeat(256)))
            .unwrap_err()
            .why
            .contains("longer")
    );
    assert!(
        ImageReference::from_name_and_tag("nginx:1", "2")
            .unwrap_err()
            .why
            .contains("already")
    );
    assert!(
        ImageReference::from_name_and_tag("nginx", "")
            .unwrap_err()
            .why
            .contains("empty")
    );
}

#[test]
fn reference_matches_its_repo_tags_and_digests() {
    let tagged = ImageReference::parse("nginx:1").unwrap();
    assert!(tagged.is_same_image("docker.io/library/nginx:1"));
    assert!(!tagged.is_same_image("docker.io/library/nginx:2"));
    assert!(!tagged.is_same_image("quay.io/library/nginx:1"));
    assert!(!tagged.is_same_image("<none>:<none>"));
    let pinned = ImageReference::parse(&format!("nginx@{DIGEST}")).unwrap();
    assert!(pinned.is_same_image(&format!("docker.io/library/nginx@{DIGEST}")));
}

prop_compose! {
    fn any_reference()(
        host in prop::option::of("([a-z0-9]{1,8}\\.[a-z]{2,3}|localhost)(:[1-9][0-9]{1,3})?"),
        path in "[a-z0-9]{1,6}((\\.|_|__|-{1,3})[a-z0-9]{1,4})?(/[a-z0-9]{1,6}){0,2}",
        tag in prop::option::of("[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}"),
        digest in prop::option::of("sha256:[0-9a-f]{64}"),
    ) -> String {
        let mut s = host.map_or_else(String::new, |h| format!("{h}/"));
        s.push_str(&path);
        if let Some(t) = tag { s.push(':'); s.push_str(&t); }
        if let Some(d) = digest { s.push('@'); s.push_str(&d); }
        s
    }
}

/// A name of Docker Hub whose first part looks like a registry's host keeps its own host: without it, a different
/// registry would be used.
#[test]
fn familiar_name_refers_to_the_same_image() {
    for name in [
        "docker.io/a.example/b",
        "docker.io/localhost/b",
        "docker.io/library/library/b",
    ] {
        let read = ImageReference::parse(&format!("{name}:1")).unwrap();
        let stored = ImageReference::from_name_and_tag(&read.familiar_name(), "1").unwrap();
        assert_eq!(stored.to_string(), format!("{name}:1"));
    }
    let hex = "a".repeat(64);
    let read = ImageReference::parse(&format!("docker.io/library/{hex}:1")).unwrap();
    assert_eq!(read.familiar_name(), format!("docker.io/library/{hex}"));
}

proptest! {
    /// A NodeImage stores enough to pull the same image again.
    #[test]
    fn node_image_name_and_tag_round_trip(given in any_reference()) {
        let r = ImageReference::parse(&given).unwrap();
        let back = ImageReference::from_name_and_tag(&r.familiar_name(), r.tag_or_digest()).unwrap();
        prop_assert_eq!(back.to_string(), r.to_string());
        prop_assert!(r.is_same_image(&back.to_string()));
    }

    /// The runtime's form parses to the same reference.
    #[test]
    fn display_is_a_fixed_point(given in any_reference()) {
        let full = ImageReference::parse(&given).unwrap().to_string();
        prop_assert_eq!(ImageReference::parse(&full).unwrap().to_string(), full);
    }

    /// No input causes a panic, and every accepted reference is also accepted in its own form.
    #[test]
    fn parse_never_panics(given in "\\PC{0,80}") {
        if let Ok(r) = ImageReference::parse(&given) {
            prop_assert!(ImageReference::parse(&r.to_string()).is_ok());
        }
    }
}
