//! Two replicas: one leads, and the other takes over when it dies, with nothing lost or done twice.

use std::time::Instant;

use k8s_openapi::api::coordination::v1::Lease;
use kruise_api::node_image::NodeImage;
use kube::api::Api;
use serde_json::json;

use crate::manager::Manager;
use crate::world::{Answer, World, answer, asked, completed, create, job, jobs, nodes, until};

fn holder(lease: &Lease) -> String {
    let spec = lease.spec.as_ref();
    spec.and_then(|s| s.holder_identity.clone()).unwrap_or_default()
}

/// Who leads, once that is somebody other than `before`.
async fn handed_over(leases: &Api<Lease>, what: &'static str, before: &str) -> String {
    let before = before.to_owned();
    let other = move |l: &Lease| !holder(l).is_empty() && holder(l) != before;
    holder(&until(leases, "kruise-manager", what, other).await)
}

#[tokio::test]
async fn a_second_replica_takes_over_where_the_first_died() {
    let world = World::new();
    let admin = world.admin().await;
    let leases = Api::<Lease>::namespaced(admin.client.clone(), "kruise-system");
    let images = Api::<NodeImage>::all(admin.client.clone());
    let mut first = world.manager("kruise-manager-1");
    first.start().unwrap();
    let led = handed_over(&leases, "held", "").await;
    let mut second = world.manager("kruise-manager-2");
    second.start().unwrap();
    nodes(&admin, &["elect-1", "elect-2"], json!({})).await;
    let spec = json!({ "image": "nginx:elect", "parallelism": 1 });
    create(&jobs(&admin), job("elect", spec)).await;
    asked(&admin, "elect-1", "nginx", "elect").await;

    let killed = Instant::now();
    first.kill().unwrap();
    // While nobody leads the daemon answers; the new leader must see it.
    answer(&admin, "elect-1", Answer::Succeeded).await;
    let taken = handed_over(&leases, "taken over", &led).await;
    asked(&admin, "elect-2", "nginx", "elect").await;
    println!("took over after {:?}", killed.elapsed());
    // client-go's default, by which a replica of either make knows when it may take over.
    let lease = leases.get("kruise-manager").await.unwrap();
    assert_eq!(lease.spec.unwrap().lease_duration_seconds, Some(15));
    answer(&admin, "elect-2", Answer::Succeeded).await;
    let ended = until(&jobs(&admin), "elect", "ended", completed).await;
    assert_eq!(ended.status.unwrap().succeeded, 2);
    for node in ["elect-1", "elect-2"] {
        let image = images.get(node).await.unwrap();
        let tags = &image.spec.images["nginx"].tags;
        assert_eq!(
            (tags.len(), tags[0].version, tags[0].owner_references.len()),
            (1, 0, 1)
        );
    }

    // One that ends in order releases the Lease, so that the next one need not wait.
    let mut third = world.manager("kruise-manager-3");
    third.start().unwrap();
    second.stop().unwrap();
    let left = leases.get("kruise-manager").await.unwrap();
    assert_ne!(holder(&left), taken, "it has ended and holds the Lease still");
    handed_over(&leases, "handed over", &taken).await;
}

/// However long a Lease lasts, an upgrade does not wait for its end.
#[tokio::test]
async fn a_replica_that_ends_in_order_is_not_waited_for() {
    let world = World::new();
    let admin = world.admin().await;
    let leases = Api::<Lease>::namespaced(admin.client.clone(), "kruise-system");
    let long = ["--leader-election-lease-duration=600s".to_owned()];
    let mut replicas = ["kruise-manager-long-1", "kruise-manager-long-2"]
        .map(|name| Manager::somewhere_with(&world.plane, name, &long));
    let [first, second] = &mut replicas;
    first.start().unwrap();
    let led = handed_over(&leases, "held", "").await;
    second.start().unwrap();
    let lease = leases.get("kruise-manager").await.unwrap();
    assert_eq!(lease.spec.unwrap().lease_duration_seconds, Some(600));
    let ended = Instant::now();
    first.stop().unwrap();
    handed_over(&leases, "handed over", &led).await;
    println!("took over after {:?}", ended.elapsed());
}

#[tokio::test]
async fn a_leader_without_api_server_stops_its_controllers_and_comes_back() {
    let mut world = World::new();
    let admin = world.admin().await;
    let mut manager = world.manager("kruise-manager");
    manager.start().unwrap();
    nodes(&admin, &["away-1", "away-2"], json!({})).await;
    let spec = json!({ "image": "nginx:away", "parallelism": 1 });
    create(&jobs(&admin), job("away", spec)).await;
    asked(&admin, "away-1", "nginx", "away").await;
    manager.until_it_says("leading");
    world.plane.apiserver.kill().unwrap();
    manager.until_it_says("standing by");
    world.plane.apiserver.start().unwrap();
    manager.until_it_says("leading");
    assert!(manager.running(), "{}", manager.tail());
    // A connection of the test itself may have died with the API server.
    let admin = world.admin().await;
    answer(&admin, "away-1", Answer::Succeeded).await;
    asked(&admin, "away-2", "nginx", "away").await;
    answer(&admin, "away-2", Answer::Succeeded).await;
    until(&jobs(&admin), "away", "ended", completed).await;
}
