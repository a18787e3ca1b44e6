//! Two replicas: one is leader, and the standby takes over when it dies, with nothing lost or done twice.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kruise_api::node_image::NodeImage;
use kube::api::Api;
use serde_json::json;

use crate::manager::Manager;
use crate::test_cluster::{
    PullOutcome, TestCluster, completed, create, create_nodes, job, jobs, report_pull, wait_for_tag,
    wait_until,
};

fn holder(lease: &Lease) -> String {
    let spec = lease.spec.as_ref();
    spec.and_then(|s| s.holder_identity.clone()).unwrap_or_default()
}

/// Returns the leader once it is not `before`.
async fn wait_for_new_holder(leases: &Api<Lease>, what: &'static str, before: &str) -> String {
    let before = before.to_owned();
    let other = move |l: &Lease| !holder(l).is_empty() && holder(l) != before;
    holder(&wait_until(leases, "kruise-manager", what, other).await)
}

#[tokio::test]
async fn standby_takes_over_after_leader_crash() {
    let cluster = TestCluster::new();
    let admin = cluster.admin().await;
    let leases = Api::<Lease>::namespaced(admin.client.clone(), "kruise-system");
    let images = Api::<NodeImage>::all(admin.client.clone());
    let mut first = cluster.manager("kruise-manager-1");
    first.start().unwrap();
    let first_holder = wait_for_new_holder(&leases, "held", "").await;
    let mut second = cluster.manager("kruise-manager-2");
    second.start().unwrap();
    create_nodes(&admin, &["elect-1", "elect-2"], json!({})).await;
    let spec = json!({ "image": "nginx:elect", "parallelism": 1 });
    create(&jobs(&admin), job("elect", spec)).await;
    wait_for_tag(&admin, "elect-1", "nginx", "elect").await;

    let killed = Instant::now();
    first.kill().unwrap();
    // The daemon reports while there is no leader; the new leader must observe that.
    report_pull(&admin, "elect-1", PullOutcome::Succeeded).await;
    let second_holder = wait_for_new_holder(&leases, "taken over", &first_holder).await;
    wait_for_tag(&admin, "elect-2", "nginx", "elect").await;
    println!("took over after {:?}", killed.elapsed());
    // client-go's default: from it, a replica of either implementation knows when it may take over.
    let lease = leases.get("kruise-manager").await.unwrap();
    assert_eq!(lease.spec.unwrap().lease_duration_seconds, Some(15));
    report_pull(&admin, "elect-2", PullOutcome::Succeeded).await;
    let ended = wait_until(&jobs(&admin), "elect", "ended", completed).await;
    assert_eq!(ended.status.unwrap().succeeded, 2);
    for node in ["elect-1", "elect-2"] {
        let image = images.get(node).await.unwrap();
        let tags = &image.spec.images["nginx"].tags;
        assert_eq!(
            (tags.len(), tags[0].version, tags[0].owner_references.len()),
            (1, 0, 1)
        );
    }

    // A graceful shutdown releases the Lease, so the next leader does not wait.
    let mut third = cluster.manager("kruise-manager-3");
    third.start().unwrap();
    second.stop().unwrap();
    let lease_after_stop = leases.get("kruise-manager").await.unwrap();
    assert_ne!(
        holder(&lease_after_stop),
        second_holder,
        "it has ended and holds the Lease still"
    );
    wait_for_new_holder(&leases, "handed over", &second_holder).await;
}

/// An upgrade does not wait for the Lease to expire, however long it lasts.
#[tokio::test]
async fn graceful_shutdown_releases_the_lease() {
    let cluster = TestCluster::new();
    let admin = cluster.admin().await;
    let leases = Api::<Lease>::namespaced(admin.client.clone(), "kruise-system");
    let lease_duration = Duration::from_secs(600);
    let flags = [format!(
        "--leader-election-lease-duration={}s",
        lease_duration.as_secs()
    )];
    let mut replicas = ["kruise-manager-long-1", "kruise-manager-long-2"]
        .map(|name| Manager::on_free_ports_with(&cluster.plane, name, &flags));
    let [first, second] = &mut replicas;
    first.start().unwrap();
    let first_holder = wait_for_new_holder(&leases, "held", "").await;
    second.start().unwrap();
    let lease = leases.get("kruise-manager").await.unwrap();
    assert_eq!(lease.spec.unwrap().lease_duration_seconds, Some(600));
    let ended = Instant::now();
    first.stop().unwrap();
    wait_for_new_holder(&leases, "handed over", &first_holder).await;
    let after = ended.elapsed();
    println!("took over after {after:?}");
    assert!(
        after < lease_duration / 10,
        "{after:?}: it waited for the Lease to expire"
    );
}

#[tokio::test]
async fn leader_without_api_server_steps_down_and_recovers() {
    let mut cluster = TestCluster::new();
    let admin = cluster.admin().await;
    let mut manager = cluster.manager("kruise-manager");
    manager.start().unwrap();
    create_nodes(&admin, &["away-1", "away-2"], json!({})).await;
    let spec = json!({ "image": "nginx:away", "parallelism": 1 });
    create(&jobs(&admin), job("away", spec)).await;
    wait_for_tag(&admin, "away-1", "nginx", "away").await;
    manager.wait_for_readyz_text("leading");
    cluster.plane.apiserver.kill().unwrap();
    manager.wait_for_readyz_text("standing by");
    cluster.plane.apiserver.start().unwrap();
    manager.wait_for_readyz_text("leading");
    assert!(manager.is_running(), "{}", manager.tail());
    // A connection of the test may have been closed with the API server.
    let admin = cluster.admin().await;
    report_pull(&admin, "away-1", PullOutcome::Succeeded).await;
    wait_for_tag(&admin, "away-2", "nginx", "away").await;
    report_pull(&admin, "away-2", PullOutcome::Succeeded).await;
    wait_until(&jobs(&admin), "away", "ended", completed).await;
}
