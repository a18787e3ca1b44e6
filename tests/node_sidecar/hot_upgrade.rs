//! Hot upgrades under load: the sidecar serves all requests while its version changes.

use std::ops::Deref;
use std::sync::OnceLock;

use serde_json::{Value, json};
use testbed::cluster::{Image, Registry};

use crate::load::{Load, wait_for_turn};
use crate::sidecar_ops::{SidecarTest, condition, containers};
use crate::workloads::{TestCluster, shared_cluster};

/// It only waits, and has a shell for the hooks and the probe.
const EMPTY_IMAGE: &str = "kruise-test/term:1";

/// Tag and arguments of the images of `relay`; the tag is the version that its answers have.
const RELAYS: [(&str, &str); 4] = [
    ("v1", ""),
    ("v2", ""),
    ("v3", "never-ready"),
    ("v4", "never-ready-after-take-over"),
];

fn relay_image(version: &str) -> String {
    format!("kruise-test/relay:{version}")
}

fn push_images(registry: &Registry) {
    static PUSHED: OnceLock<()> = OnceLock::new();
    PUSHED.get_or_init(|| {
        for (version, mode) in RELAYS {
            let image = Image::busybox().program("/bin/relay", env!("CARGO_BIN_EXE_test-relay"));
            let words = ["relay", "serve", version, mode];
            let words = words.into_iter().filter(|word| !word.is_empty());
            registry
                .push(&relay_image(version), &image.unwrap().cmd(words))
                .unwrap();
        }
    });
}

/// The sidecar in this version. Both of its containers have the same hooks and probe; they do nothing in the one that
/// has the empty image.
fn relay(version: &str, upgrade_type: &str) -> Value {
    let unless_empty = |command: &str| {
        let script = format!("[ \"$SIDECARSET_VERSION\" = 0 ] || relay {command}");
        json!({ "exec": { "command": ["sh", "-c", script] } })
    };
    let mut probe = unless_empty("ready");
    probe["periodSeconds"] = json!(1);
    probe["timeoutSeconds"] = json!(20);
    let mut strategy = json!({ "upgradeType": upgrade_type });
    if upgrade_type == "HotUpgrade" {
        strategy["hotUpgradeEmptyImage"] = json!(EMPTY_IMAGE);
    }
    json!([{
        "name": "relay", "image": relay_image(version), "imagePullPolicy": "IfNotPresent",
        "lifecycle": { "postStart": unless_empty("take-over"), "preStop": unless_empty("drain") },
        "readinessProbe": probe,
        "upgradeStrategy": strategy,
    }])
}

/// A set of version v1 with one ready Pod, and clients that send requests to that.
async fn start(upgrade_type: &str) -> (SidecarTest<impl Deref<Target = TestCluster>>, Value, Load) {
    let test = shared_cluster().await;
    push_images(&test.cluster.node.runtime.registry);
    let turn = wait_for_turn().await;
    let sidecars = SidecarTest::create(test, relay("v1", upgrade_type), json!({}));
    let pod = sidecars.create_ready_pod_with("web", json!({ "terminationGracePeriodSeconds": 60 }));
    sidecars.wait_status("one Pod that is ready", |status| status["updatedReadyPods"] == 1);
    let load = Load::start(turn, pod["status"]["podIP"].as_str().unwrap());
    load.wait_answers_of("v1");
    (sidecars, pod, load)
}

/// Whether the containers have these images, and run them.
fn runs(pod: &Value, images: [&str; 2]) -> bool {
    let expected = ["relay-1", "relay-2"].into_iter().zip(images);
    let has = |list: &Value, name: &str, image: &str| {
        let mut list = list.as_array().into_iter().flatten();
        list.any(|one| one["name"] == name && one["image"].as_str().is_some_and(|i| i.ends_with(image)))
    };
    let mut expected = expected.map(|(name, image)| {
        has(&pod["spec"]["containers"], name, image) && has(&pod["status"]["containerStatuses"], name, image)
    });
    expected.all(|has| has) && condition(pod, "Ready") == "True"
}

#[tokio::test]
async fn hot_upgrade_and_its_rollback_drop_no_request() {
    let (sidecars, before, load) = start("HotUpgrade").await;
    let (v1, v2) = (relay_image("v1"), relay_image("v2"));

    sidecars.patch(json!({ "containers": relay("v2", "HotUpgrade") }));
    sidecars.wait_pod("web", "v2 works", |pod| runs(pod, [EMPTY_IMAGE, &v2]));
    load.wait_answers_of("v2");

    sidecars.patch(json!({ "containers": relay("v1", "HotUpgrade") }));
    let after = sidecars.wait_pod("web", "v1 works", |pod| runs(pod, [&v1, EMPTY_IMAGE]));
    load.wait_answers_of("v1");

    sidecars.wait_status("the Pod updated and ready", |status| {
        status["updatedReadyPods"] == 1
    });
    load.finish().assert_all_answered(&["v1", "v2"]);
    assert_eq!(containers(&before)["app"], containers(&after)["app"]);
}

/// The upgrade to a version that never becomes ready, and its rollback.
async fn roll_back_unfinished_upgrade(version: &str, serves_meanwhile: &str) {
    let (sidecars, before, load) = start("HotUpgrade").await;
    let (v1, new) = (relay_image("v1"), relay_image(version));

    sidecars.patch(json!({ "containers": relay(version, "HotUpgrade") }));
    sidecars.wait_pod("web", "the new version runs", |pod| {
        let mut statuses = pod["status"]["containerStatuses"]
            .as_array()
            .into_iter()
            .flatten();
        statuses.any(|status| {
            let image = status["image"].as_str().unwrap_or_default();
            image.ends_with(&new) && status["state"]["running"].is_object() && status["ready"] == false
        })
    });
    load.wait_answers_of(serves_meanwhile);

    sidecars.patch(json!({ "containers": relay("v1", "HotUpgrade") }));
    let after = sidecars.wait_pod("web", "v1 works", |pod| runs(pod, [&v1, EMPTY_IMAGE]));
    load.wait_answers_of("v1");

    sidecars.wait_status("the Pod updated and ready", |status| {
        status["updatedReadyPods"] == 1
    });
    load.finish().assert_all_answered(&["v1", serves_meanwhile]);
    for name in ["app", "relay-1"] {
        assert_eq!(
            containers(&before)[name],
            containers(&after)[name],
            "{name} runs on"
        );
    }
}

#[tokio::test]
async fn rollback_before_the_new_version_is_ready_drops_no_request() {
    roll_back_unfinished_upgrade("v3", "v1").await;
}

#[tokio::test]
async fn rollback_after_the_new_version_has_taken_over_drops_no_request() {
    roll_back_unfinished_upgrade("v4", "v4").await;
}

/// Shows that the clients notice what a hot upgrade avoids.
#[tokio::test]
async fn cold_upgrade_drops_requests() {
    let (sidecars, _, load) = start("ColdUpgrade").await;
    sidecars.patch(json!({ "containers": relay("v2", "ColdUpgrade") }));
    sidecars.wait_status("the Pod updated and ready", |status| {
        status["updatedReadyPods"] == 1
    });
    load.wait_answers_of("v2");
    let counts = load.finish();
    println!("{counts}");
    assert!(counts.failed() > 0, "{counts}");
}
