#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

#[test]
fn looks_at_the_known_places_in_upstreams_order() {
    let options = Options {
        root: "/hostvarrun".into(),
        socket_file: None,
    };
    let list = options.candidates();
    assert_eq!(list.len(), 6);
    assert_eq!(list[0], Path::new("/hostvarrun/containerd.sock"));
    assert_eq!(list[3], Path::new("/hostvarrun/crio/crio.sock"));
}

#[test]
fn a_given_socket_is_the_only_one() {
    let of = |file: &str| {
        Options {
            root: "/hostvarrun".into(),
            socket_file: Some(file.into()),
        }
        .candidates()
    };
    assert_eq!(of("x/y.sock"), [Path::new("/hostvarrun/x/y.sock")]);
    assert_eq!(of("/run/y.sock"), [Path::new("/run/y.sock")]);
    assert_eq!(of("unix:///run/y.sock"), [Path::new("/run/y.sock")]);
}

#[test]
fn why_none_answers_names_missing_sockets_once() {
    let mut slots: Vec<_> = ["/a", "/b", "/c"].map(|s| Slot::new(s.into()).health).into();
    slots[0].present = true;
    slots[0].words = "runtime at /a did not answer".to_owned();
    assert_eq!(
        why_none(&slots),
        "runtime at /a did not answer; no socket at /b, /c"
    );
}

#[tokio::test]
async fn says_what_is_at_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f.sock");
    assert!(missing(&file).await.unwrap().contains("there is no socket"));
    std::fs::write(&file, "").unwrap();
    assert!(missing(&file).await.unwrap().contains("is not a socket"));
}
