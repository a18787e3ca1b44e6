//! The CRI client, byte progress and `kruise-daemon pull` on real containerd of each supported series.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod container_details;
mod fixture;
mod pins;

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use kruise_api::image_reference::ImageReference;
use kruise_cri::{Error, PullCause, Runtime as _};
use kruise_daemon::image_pull::act::{error_message, run_attempt};
use testbed::cluster::{CONTAINERD_VERSIONS, REGISTRY_PASSWORD};

use fixture::{RuntimeFixture, credentials, pull_attempt, pull_failure_cause};

const TERM_IMAGE: &str = "docker.io/kruise-test/term:1";
const MIB: usize = 1 << 20;

async fn run_suite(suite: &'static str) {
    let series = CONTAINERD_VERSIONS.iter().find(|(s, _)| *s == suite).unwrap().1;
    let mut fixture = RuntimeFixture::start(suite).await;
    let version = fixture.client.version().await.unwrap();
    assert_eq!(version.runtime_name, "containerd");
    assert!(
        version
            .runtime_version
            .trim_start_matches('v')
            .starts_with(series),
        "{version:?}"
    );
    container_details::container_details_survive_exit(&fixture).await;
    pull_by_tag_and_digest(&fixture).await;
    pull_with_credentials(&fixture).await;
    pull_failure_causes(&fixture).await;
    pull_progress_counts_bytes(&fixture).await;
    concurrent_pulls_of_one_repository(&fixture).await;
    dropped_pull_is_cancelled(&fixture).await;
    pull_command_uses_docker_config(&fixture).await;
    pull_on_full_disk(&fixture).await;
    pull_that_cannot_fit_is_cancelled(&fixture).await;
    unpacked_layers_count_as_present(&fixture).await;
    // The first series with pinned images is 1.7.
    if suite != "bookworm" {
        pins::image_is_pinned_until_a_time(&fixture).await;
        pins::foreign_pin_stays(&fixture).await;
    }
    containerd_restart_during_pull(&mut fixture).await;
}

async fn pull_by_tag_and_digest(fixture: &RuntimeFixture) {
    assert_eq!(fixture.client.image_status(TERM_IMAGE).await.unwrap(), None);
    let first = run_attempt(
        fixture.client.as_ref(),
        &pull_attempt(TERM_IMAGE, vec![]),
        || true,
        |_| (),
    )
    .await
    .unwrap();
    assert!(
        !first.already_present
            && first
                .image_id
                .as_ref()
                .unwrap()
                .starts_with("kruise-test/term@sha256:"),
        "{first:?}"
    );
    let again = run_attempt(
        fixture.client.as_ref(),
        &pull_attempt(TERM_IMAGE, vec![]),
        || true,
        |_| (),
    )
    .await
    .unwrap();
    assert!(
        again.already_present && again.image_id == first.image_id && again.note.is_none(),
        "{again:?}"
    );
    let image = fixture.client.image_status(TERM_IMAGE).await.unwrap().unwrap();
    assert!(
        image
            .repo_tags
            .iter()
            .any(|t| ImageReference::parse(TERM_IMAGE).unwrap().is_same_image(t)),
        "{image:?}"
    );

    pull_by_digest_only(fixture, &image).await;
}

/// The digest of a present image is present; after the image is removed, the digest is pulled without the tag.
async fn pull_by_digest_only(fixture: &RuntimeFixture, image: &kruise_cri::Image) {
    let pinned = image.repo_digests[0].clone();
    let by_digest = run_attempt(
        fixture.client.as_ref(),
        &pull_attempt(&pinned, vec![]),
        || true,
        |_| (),
    )
    .await
    .unwrap();
    assert!(by_digest.already_present, "{pinned} is not recognised as present");
    for name in [TERM_IMAGE, &pinned, &image.id] {
        fixture.runtime.ctr(&["images", "rm", "--sync", name]).unwrap();
    }
    // containerd's CRI plugin is updated by a separate event.
    let start = Instant::now();
    while fixture.client.image_status(&pinned).await.unwrap().is_some() {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "{pinned} is still there 30 s after its removal"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let by_digest = run_attempt(
        fixture.client.as_ref(),
        &pull_attempt(&pinned, vec![]),
        || true,
        |_| (),
    )
    .await
    .unwrap();
    assert!(!by_digest.already_present);
    assert!(fixture.client.image_status(&pinned).await.unwrap().is_some());
    assert!(
        fixture.client.image_status(TERM_IMAGE).await.unwrap().is_none(),
        "a digest does not bring the tag"
    );
}

async fn pull_with_credentials(fixture: &RuntimeFixture) {
    let image = format!("{}/kruise-test/term:2", fixture.runtime.registry.private_host());
    assert_eq!(
        pull_failure_cause(fixture.pull(&image).await),
        PullCause::Unauthorized
    );
    let denied = run_attempt(
        fixture.client.as_ref(),
        &pull_attempt(&image, vec![credentials("wrong")]),
        || true,
        |_| (),
    )
    .await
    .unwrap_err()
    .error;
    assert!(
        matches!(
            denied,
            Error::Pull {
                cause: PullCause::Unauthorized,
                ..
            }
        ),
        "{denied:?}"
    );
    let both_credentials = vec![credentials("wrong"), credentials(REGISTRY_PASSWORD)];
    let allowed = run_attempt(
        fixture.client.as_ref(),
        &pull_attempt(&image, both_credentials),
        || true,
        |_| (),
    )
    .await
    .unwrap();
    assert!(!allowed.already_present);
}

async fn pull_failure_causes(fixture: &RuntimeFixture) {
    assert_eq!(
        pull_failure_cause(fixture.pull("docker.io/kruise-test/none:1").await),
        PullCause::NotFound
    );
    fixture
        .runtime
        .registry
        .add_registry_host("down.test", "http://127.0.0.1:1")
        .unwrap();
    assert_eq!(
        pull_failure_cause(fixture.pull("down.test/a:1").await),
        PullCause::RegistryUnavailable
    );
    fixture.registry.respond_with(
        "refuses",
        StatusCode::FORBIDDEN,
        r#"{"errors":[{"code":"DENIED"}]}"#,
    );
    assert_eq!(
        pull_failure_cause(fixture.pull("fake.test/refuses/a:1").await),
        PullCause::Unauthorized
    );
    fixture
        .registry
        .respond_with("broken", StatusCode::SERVICE_UNAVAILABLE, "out of order");
    assert_eq!(
        pull_failure_cause(fixture.pull("fake.test/broken/a:1").await),
        PullCause::RegistryUnavailable
    );
    fixture
        .registry
        .respond_with("garbage", StatusCode::OK, "<html>welcome</html>");
    assert_eq!(
        pull_failure_cause(fixture.pull("fake.test/garbage/a:1").await),
        PullCause::InvalidImage
    );

    let foreign_image = fixture.registry.image("elsewhere", "only", 1024, "s390x");
    foreign_image.allow(usize::MAX);
    fixture.registry.index("elsewhere", "1", &foreign_image, "s390x");
    assert_eq!(
        pull_failure_cause(fixture.pull("fake.test/elsewhere:1").await),
        PullCause::WrongPlatform
    );
    let foreign_only = run_attempt(
        fixture.client.as_ref(),
        &pull_attempt("fake.test/elsewhere:only", vec![]),
        || true,
        |_| (),
    )
    .await
    .unwrap();
    assert!(
        foreign_only
            .note
            .as_ref()
            .is_some_and(|n| n.contains("linux/s390x")),
        "{foreign_only:?}"
    );
}

async fn pull_progress_counts_bytes(fixture: &RuntimeFixture) {
    let image_source = fixture.registry.image("large", "1", 8 * MIB, "amd64");
    let image = "fake.test/large:1";
    assert_eq!(
        fixture.client.pull_progress(image).await.unwrap(),
        None,
        "nothing is being pulled"
    );
    let pull = fixture.spawn_pull(image);
    let mut last = 0;
    for half in [2 * MIB, 5 * MIB, 7 * MIB] {
        image_source.allow(half);
        // containerd counts what it has written; some bytes may still be in buffers.
        let bytes = fixture.wait_for_bytes(image, (half - MIB) as u64).await;
        assert_eq!(bytes.total, image_source.total);
        assert!(
            last < bytes.downloaded && bytes.downloaded < bytes.total,
            "{last} then {bytes:?}"
        );
        last = bytes.downloaded;
    }
    image_source.allow(usize::MAX);
    pull.await.unwrap().unwrap();
    assert_eq!(
        fixture.client.pull_progress(image).await.unwrap(),
        None,
        "the pull is over"
    );
}

async fn concurrent_pulls_of_one_repository(fixture: &RuntimeFixture) {
    let first = fixture.registry.image("twins", "1", 3 * MIB, "amd64");
    let second = fixture.registry.image("twins", "2", 4 * MIB, "amd64");
    let pinned = format!("fake.test/twins@{}", second.digest);
    let pulls = [
        fixture.spawn_pull("fake.test/twins:1"),
        fixture.spawn_pull(&pinned),
    ];
    first.allow(2 * MIB);
    second.allow(2 * MIB);
    let bytes = fixture.wait_for_bytes(&pinned, MIB as u64).await;
    assert_eq!(bytes.total, second.total, "a digest says which of them it is");
    let bytes = fixture.wait_for_bytes("fake.test/twins:1", MIB as u64).await;
    assert_eq!(bytes.total, first.total, "and so the other one is known too");
    first.allow(usize::MAX);
    second.allow(usize::MAX);
    for pull in pulls {
        pull.await.unwrap().unwrap();
    }
}

/// The next pull waits for the lock of a layer that another pull is writing: it ends only if the first has ended.
async fn dropped_pull_is_cancelled(fixture: &RuntimeFixture) {
    let image_source = fixture.registry.image("dropped", "1", 4 * MIB, "amd64");
    let image = "fake.test/dropped:1";
    let pull = fixture.spawn_pull(image);
    image_source.allow(2 * MIB);
    fixture.wait_for_bytes(image, MIB as u64).await;
    pull.abort();
    image_source.allow(usize::MAX);
    fixture
        .pull(image)
        .await
        .expect("the image can be pulled afterwards");
}

async fn pull_command_uses_docker_config(fixture: &RuntimeFixture) {
    let config = fixture.runtime.dir().join("docker.json");
    std::fs::write(&config, fixture.runtime.registry.docker_config()).unwrap();
    let image = format!(
        "{}/kruise-test/slow-stop:1",
        fixture.runtime.registry.private_host()
    );
    let mut command = tokio::process::Command::new(support::binaries::daemon());
    command
        .arg("pull")
        .arg("--socket-file")
        .arg(fixture.runtime.socket())
        .arg("--docker-config")
        .arg(&config);
    command
        .args([&image, TERM_IMAGE, "--output", "json"])
        .kill_on_drop(true);
    let out = tokio::time::timeout(Duration::from_secs(120), command.output())
        .await
        .expect("it ends")
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    for image in [&image, TERM_IMAGE] {
        assert!(
            fixture.client.image_status(image).await.unwrap().is_some(),
            "{image} is not on the node"
        );
    }
}

async fn pull_on_full_disk(fixture: &RuntimeFixture) {
    let image_source = fixture.registry.image("huge", "1", 12 * MIB, "amd64");
    image_source.allow(usize::MAX);
    let store = fixture
        .runtime
        .dir()
        .join("containerd/io.containerd.content.v1.content");
    let shell = |script: &str| {
        let status = fixture
            .runtime
            .command("sh")
            .args(["-ec", script, "sh"])
            .arg(&store)
            .status()
            .unwrap();
        assert!(status.success(), "{script}");
    };
    shell("mount -t tmpfs -o size=4m tmpfs $1; mkdir $1/ingest");
    let failure = pull_failure_cause(fixture.pull("fake.test/huge:1").await);
    shell("umount $1");
    assert_eq!(failure, PullCause::DiskFull);
}

/// No byte of the layer is ever sent, so that only the check can end this pull.
async fn pull_that_cannot_fit_is_cancelled(fixture: &RuntimeFixture) {
    fixture.registry.image_with_stated_size("petabyte", "1", 1 << 50);
    let image = "fake.test/petabyte:1";
    let attempt = pull_attempt(image, vec![]);
    let result = run_attempt(fixture.client.as_ref(), &attempt, || false, |_| ()).await;
    let error = result.unwrap_err().error;
    let text = error_message(&error);
    assert!(
        text.starts_with("InsufficientDisk: at least 2048.0 TiB are needed")
            && text.ends_with(" are available"),
        "{text}"
    );
}

/// With `discard_unpacked_layers` of containerd, the blobs of images that are there are not.
async fn unpacked_layers_count_as_present(fixture: &RuntimeFixture) {
    let registry = &fixture.registry;
    let (first, base) = registry.image_on_base("based", "1", 8 * MIB, 512);
    first.allow(usize::MAX);
    fixture.pull("fake.test/based:1").await.unwrap();
    fixture.runtime.ctr(&["content", "rm", &base]).unwrap();
    let (second, _) = registry.image_on_base("based", "2", 8 * MIB, 4 * MIB);
    second.allow(MIB);
    let pull = fixture.spawn_pull("fake.test/based:2");
    let bytes = fixture.wait_for_bytes("fake.test/based:2", 9 * MIB as u64).await;
    assert_eq!(bytes.total, second.total);
    second.allow(usize::MAX);
    pull.await.unwrap().unwrap();
}

async fn containerd_restart_during_pull(fixture: &mut RuntimeFixture) {
    for (n, kill) in [true, false].into_iter().enumerate() {
        let image = format!("fake.test/restart{n}:1");
        let image_source = fixture
            .registry
            .image(&format!("restart{n}"), "1", 4 * MIB, "amd64");
        let pull = fixture.spawn_pull(&image);
        image_source.allow(2 * MIB);
        fixture.wait_for_bytes(&image, MIB as u64).await;
        if kill {
            fixture.runtime.containerd.kill().unwrap()
        } else {
            fixture.runtime.containerd.stop().unwrap()
        }
        let error = pull.await.unwrap().unwrap_err();
        assert!(
            matches!(error, Error::Unreachable { .. }),
            "kill {kill}: {error:?}"
        );
        image_source.allow(usize::MAX);
        fixture.runtime.containerd.start().unwrap();
        fixture.pull_after_restart(&image).await;
    }
}

#[tokio::test]
async fn containerd_1_6() {
    Box::pin(run_suite("bookworm")).await;
}

#[tokio::test]
async fn containerd_1_7() {
    Box::pin(run_suite("trixie")).await;
}

#[tokio::test]
async fn containerd_2() {
    Box::pin(run_suite("forky")).await;
}
