//! The CRI client, byte progress and `kruise-daemon pull` on real containerd of each supported series.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bed;
mod details;

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use kruise_api::image_reference::Reference;
use kruise_cri::{Error, PullCause, Runtime as _};
use kruise_daemon::image_pull::act::attempt;
use testbed::cluster::{CONTAINERDS, REGISTRY_PASSWORD};

use bed::{Bed, attempt_of, cause, login};

const TERM: &str = "docker.io/kruise-test/term:1";
const MIB: usize = 1 << 20;

async fn everything(suite: &'static str) {
    let series = CONTAINERDS.iter().find(|(s, _)| *s == suite).unwrap().1;
    let mut bed = Bed::start(suite).await;
    let version = bed.client.version().await.unwrap();
    assert_eq!(version.runtime_name, "containerd");
    assert!(
        version
            .runtime_version
            .trim_start_matches('v')
            .starts_with(series),
        "{version:?}"
    );
    details::what_it_was_made_with(&bed).await;
    by_tag_and_digest(&bed).await;
    with_a_password(&bed).await;
    what_cannot_be_pulled(&bed).await;
    bytes_are_counted(&bed).await;
    two_from_one_repository(&bed).await;
    a_dropped_pull_ends(&bed).await;
    the_command(&bed).await;
    a_full_disk(&bed).await;
    a_restart_in_mid_pull(&mut bed).await;
}

async fn by_tag_and_digest(bed: &Bed) {
    assert_eq!(bed.client.image_status(TERM).await.unwrap(), None);
    let first = attempt(bed.client.as_ref(), &attempt_of(TERM, vec![]), || true, |_| ())
        .await
        .unwrap();
    assert!(
        !first.present
            && first
                .image_id
                .as_ref()
                .unwrap()
                .starts_with("kruise-test/term@sha256:"),
        "{first:?}"
    );
    let again = attempt(bed.client.as_ref(), &attempt_of(TERM, vec![]), || true, |_| ())
        .await
        .unwrap();
    assert!(
        again.present && again.image_id == first.image_id && again.note.is_none(),
        "{again:?}"
    );
    let image = bed.client.image_status(TERM).await.unwrap().unwrap();
    assert!(
        image
            .repo_tags
            .iter()
            .any(|t| Reference::parse(TERM).unwrap().names(t)),
        "{image:?}"
    );

    a_digest_by_itself(bed, &image).await;
}

/// The digest of an image that is present is present; without the image it is pulled, and does not bring the tag.
async fn a_digest_by_itself(bed: &Bed, image: &kruise_cri::Image) {
    let pinned = image.repo_digests[0].clone();
    let by_digest = attempt(bed.client.as_ref(), &attempt_of(&pinned, vec![]), || true, |_| ())
        .await
        .unwrap();
    assert!(by_digest.present, "{pinned} is not recognised as present");
    for name in [TERM, &pinned, &image.id] {
        bed.runtime.ctr(&["images", "rm", "--sync", name]).unwrap();
    }
    // containerd's CRI learns of it by an event of its own.
    let start = Instant::now();
    while bed.client.image_status(&pinned).await.unwrap().is_some() {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "{pinned} is still there 30 s after its removal"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let by_digest = attempt(bed.client.as_ref(), &attempt_of(&pinned, vec![]), || true, |_| ())
        .await
        .unwrap();
    assert!(!by_digest.present);
    assert!(bed.client.image_status(&pinned).await.unwrap().is_some());
    assert!(
        bed.client.image_status(TERM).await.unwrap().is_none(),
        "a digest does not bring the tag"
    );
}

async fn with_a_password(bed: &Bed) {
    let image = format!("{}/kruise-test/term:2", bed.runtime.registry.private_host());
    assert_eq!(cause(bed.pull(&image).await), PullCause::Unauthorized);
    let wrong = attempt(
        bed.client.as_ref(),
        &attempt_of(&image, vec![login("wrong")]),
        || true,
        |_| (),
    )
    .await
    .unwrap_err()
    .error;
    assert!(
        matches!(
            wrong,
            Error::Pull {
                cause: PullCause::Unauthorized,
                ..
            }
        ),
        "{wrong:?}"
    );
    let both = vec![login("wrong"), login(REGISTRY_PASSWORD)];
    let right = attempt(bed.client.as_ref(), &attempt_of(&image, both), || true, |_| ())
        .await
        .unwrap();
    assert!(!right.present);
}

async fn what_cannot_be_pulled(bed: &Bed) {
    assert_eq!(
        cause(bed.pull("docker.io/kruise-test/none:1").await),
        PullCause::NotFound
    );
    bed.runtime
        .registry
        .serve("down.test", "http://127.0.0.1:1")
        .unwrap();
    assert_eq!(cause(bed.pull("down.test/a:1").await), PullCause::RegistryDown);
    bed.registry.answers(
        "refuses",
        StatusCode::FORBIDDEN,
        r#"{"errors":[{"code":"DENIED"}]}"#,
    );
    assert_eq!(
        cause(bed.pull("fake.test/refuses/a:1").await),
        PullCause::Unauthorized
    );
    bed.registry
        .answers("broken", StatusCode::SERVICE_UNAVAILABLE, "out of order");
    assert_eq!(
        cause(bed.pull("fake.test/broken/a:1").await),
        PullCause::RegistryDown
    );
    bed.registry
        .answers("garbage", StatusCode::OK, "<html>welcome</html>");
    assert_eq!(cause(bed.pull("fake.test/garbage/a:1").await), PullCause::Garbage);

    let other = bed.registry.image("elsewhere", "only", 1024, "s390x");
    other.allow(usize::MAX);
    bed.registry.index("elsewhere", "1", &other, "s390x");
    assert_eq!(
        cause(bed.pull("fake.test/elsewhere:1").await),
        PullCause::Platform
    );
    let only = attempt(
        bed.client.as_ref(),
        &attempt_of("fake.test/elsewhere:only", vec![]),
        || true,
        |_| (),
    )
    .await
    .unwrap();
    assert!(
        only.note.as_ref().is_some_and(|n| n.contains("linux/s390x")),
        "{only:?}"
    );
}

async fn bytes_are_counted(bed: &Bed) {
    let made = bed.registry.image("large", "1", 8 * MIB, "amd64");
    let image = "fake.test/large:1";
    assert_eq!(
        bed.client.pull_progress(image).await.unwrap(),
        None,
        "nothing is being pulled"
    );
    let pull = bed.begin(image);
    let mut last = 0;
    for half in [2 * MIB, 5 * MIB, 7 * MIB] {
        made.allow(half);
        // containerd counts what it has written; some of it may be in buffers yet.
        let bytes = bed.until_bytes(image, (half - MIB) as u64).await;
        assert_eq!(bytes.total, made.total);
        assert!(
            last < bytes.done && bytes.done < bytes.total,
            "{last} then {bytes:?}"
        );
        last = bytes.done;
    }
    made.allow(usize::MAX);
    pull.await.unwrap().unwrap();
    assert_eq!(
        bed.client.pull_progress(image).await.unwrap(),
        None,
        "the pull is over"
    );
}

async fn two_from_one_repository(bed: &Bed) {
    let one = bed.registry.image("twins", "1", 3 * MIB, "amd64");
    let two = bed.registry.image("twins", "2", 4 * MIB, "amd64");
    let pinned = format!("fake.test/twins@{}", two.digest);
    let pulls = [bed.begin("fake.test/twins:1"), bed.begin(&pinned)];
    one.allow(2 * MIB);
    two.allow(2 * MIB);
    let bytes = bed.until_bytes(&pinned, MIB as u64).await;
    assert_eq!(bytes.total, two.total, "a digest says which of them it is");
    let bytes = bed.until_bytes("fake.test/twins:1", MIB as u64).await;
    assert_eq!(bytes.total, one.total, "and so the other one is known too");
    one.allow(usize::MAX);
    two.allow(usize::MAX);
    for pull in pulls {
        pull.await.unwrap().unwrap();
    }
}

/// The next pull waits for the lock of a layer that another one is writing: it ends only if the first has ended.
async fn a_dropped_pull_ends(bed: &Bed) {
    let made = bed.registry.image("dropped", "1", 4 * MIB, "amd64");
    let image = "fake.test/dropped:1";
    let pull = bed.begin(image);
    made.allow(2 * MIB);
    bed.until_bytes(image, MIB as u64).await;
    pull.abort();
    made.allow(usize::MAX);
    bed.pull(image).await.expect("the image can be pulled afterwards");
}

async fn the_command(bed: &Bed) {
    let config = bed.runtime.dir().join("docker.json");
    std::fs::write(&config, bed.runtime.registry.docker_config()).unwrap();
    let image = format!("{}/kruise-test/slow-stop:1", bed.runtime.registry.private_host());
    let mut command = tokio::process::Command::new(support::binaries::daemon());
    command
        .arg("pull")
        .arg("--socket-file")
        .arg(bed.runtime.socket())
        .arg("--docker-config")
        .arg(&config);
    command
        .args([&image, TERM, "--output", "json"])
        .kill_on_drop(true);
    let out = tokio::time::timeout(Duration::from_secs(120), command.output())
        .await
        .expect("it ends")
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    for image in [&image, TERM] {
        assert!(
            bed.client.image_status(image).await.unwrap().is_some(),
            "{image} is not on the node"
        );
    }
}

async fn a_full_disk(bed: &Bed) {
    let made = bed.registry.image("huge", "1", 12 * MIB, "amd64");
    made.allow(usize::MAX);
    let store = bed
        .runtime
        .dir()
        .join("containerd/io.containerd.content.v1.content");
    let shell = |script: &str| {
        let status = bed
            .runtime
            .command("sh")
            .args(["-ec", script, "sh"])
            .arg(&store)
            .status()
            .unwrap();
        assert!(status.success(), "{script}");
    };
    shell("mount -t tmpfs -o size=4m tmpfs $1; mkdir $1/ingest");
    let full = cause(bed.pull("fake.test/huge:1").await);
    shell("umount $1");
    assert_eq!(full, PullCause::DiskFull);
}

async fn a_restart_in_mid_pull(bed: &mut Bed) {
    for (n, kill) in [true, false].into_iter().enumerate() {
        let image = format!("fake.test/restart{n}:1");
        let made = bed.registry.image(&format!("restart{n}"), "1", 4 * MIB, "amd64");
        let pull = bed.begin(&image);
        made.allow(2 * MIB);
        bed.until_bytes(&image, MIB as u64).await;
        if kill {
            bed.runtime.containerd.kill().unwrap()
        } else {
            bed.runtime.containerd.stop().unwrap()
        }
        let error = pull.await.unwrap().unwrap_err();
        assert!(
            matches!(error, Error::Unreachable { .. }),
            "kill {kill}: {error:?}"
        );
        made.allow(usize::MAX);
        bed.runtime.containerd.start().unwrap();
        bed.pull_when_it_is_up(&image).await;
    }
}

#[tokio::test]
async fn containerd_1_6() {
    Box::pin(everything("bookworm")).await;
}

#[tokio::test]
async fn containerd_1_7() {
    Box::pin(everything("trixie")).await;
}

#[tokio::test]
async fn containerd_2() {
    Box::pin(everything("forky")).await;
}
