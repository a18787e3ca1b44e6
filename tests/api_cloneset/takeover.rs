//! CloneSets, revisions, Pods and claims that OpenKruise left, as recorded: our manager takes over, and their manifests
//! are applied again.

use crate::manager::Manager;
use crate::test_cluster::TestCluster;
use support::charts::Charts;
use support::conversion::{CONVERTED_KINDS, wait_for_conversion};

const WITH_DEFAULTS: &str = include_str!("../data/takeover/objects.jsonl");
const WITHOUT_DEFAULTS: &str = include_str!("../data/takeover/objects-without-defaults.jsonl");

/// Starts our manager, applies everything again, and changes an image.
async fn take_over(gates: &str, recorded: &[(&'static str, &str)]) {
    let cluster = TestCluster::new();
    let (plane, admin) = (&cluster.plane, cluster.admin().await);
    let mut all = Vec::new();
    for (namespace, objects) in recorded {
        let charts = Charts::new(plane, &admin, namespace, "v1beta1");
        charts.restore(objects).await;
        let before = charts.stable_identities().await;
        all.push((charts, before));
    }
    let flags = [
        "--enable-leader-election=false".to_owned(),
        format!("--feature-gates={gates}"),
    ];
    let mut manager = Manager::on_free_ports_with(plane, "kruise-manager", &flags);
    manager.start().unwrap();
    wait_for_conversion(plane, &CONVERTED_KINDS);
    for (charts, before) in &all {
        charts.wait_observed("takeover").await;
        assert_eq!(
            charts.stable_identities().await,
            *before,
            "{}: takeover",
            charts.namespace
        );
        charts.assert_reapply_is_noop(plane, None, "the same again").await;
        let image = "registry.example.com/next:2";
        charts
            .assert_in_place_image_update(plane, image, "another image")
            .await;
        charts
            .assert_reapply_is_noop(plane, Some(image), "that image again")
            .await;
    }
}

#[tokio::test]
async fn takeover_reapplied_manifests_change_nothing() {
    let recorded = [("left-filled", WITH_DEFAULTS), ("left-bare", WITHOUT_DEFAULTS)];
    take_over("", &recorded).await;
}

#[tokio::test]
async fn takeover_without_defaults_reapply_changes_nothing() {
    take_over("TemplateNoDefaults=true", &[("kept-bare", WITHOUT_DEFAULTS)]).await;
}
