//! An ImageListPullJob whose manager is replaced while its images cannot be pulled yet.

use std::collections::BTreeMap;

use kruise_api::image_list_pull_job::ImageListPullJob;
use kruise_api::image_pull_job::ImagePullJob;
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::json;
use testbed::cluster::{Image, NODE_NAME};

use crate::interop_cluster::{InteropCluster, create};

/// A list in progress: its name, and the UIDs of its ImagePullJobs by image.
pub struct ListInProgress {
    name: String,
    jobs: BTreeMap<String, Option<String>>,
}

/// Images of a list.
fn images(name: &str) -> [String; 2] {
    ["one", "two"].map(|image| format!("cross/{name}-{image}:1"))
}

/// The list's ImagePullJobs by image.
async fn jobs_of(cluster: &InteropCluster, list: &ImageListPullJob) -> BTreeMap<String, Option<String>> {
    let all = cluster
        .api::<ImagePullJob>()
        .list(&ListParams::default())
        .await
        .unwrap();
    let is_owned = |job: &&ImagePullJob| {
        let mut owners = job.owner_references().iter();
        owners.any(|owner| Some(&owner.uid) == list.metadata.uid.as_ref())
    };
    let owned: Vec<&ImagePullJob> = all.items.iter().filter(is_owned).collect();
    assert!(owned.len() <= 2, "{owned:?}");
    let owned = owned.into_iter().map(|job| (job.spec.image.clone(), job.uid()));
    owned.collect()
}

/// Creates a list of images that the registry does not have, and waits for its ImagePullJobs.
pub async fn start_list(cluster: &InteropCluster, name: &str) -> ListInProgress {
    let spec = json!({ "images": images(name), "selector": { "names": [NODE_NAME] }, "parallelism": 1,
        "pullPolicy": { "backoffLimit": 1000 },
        "completionPolicy": { "type": "Always", "ttlSecondsAfterFinished": 3600 } });
    let lists = cluster.api::<ImageListPullJob>();
    let list = create(&lists, json!({ "metadata": { "name": name }, "spec": spec })).await;
    cluster
        .wait_until(lists, name, "both images are being pulled", |list| {
            list.status.as_ref().is_some_and(|status| status.active == 2)
        })
        .await;
    let jobs = jobs_of(cluster, &list).await;
    assert_eq!(jobs.len(), 2);
    ListInProgress {
        name: name.to_owned(),
        jobs,
    }
}

/// Makes the images available, and waits for the end: by the same ImagePullJobs.
pub async fn finish_list(cluster: &InteropCluster, list: ListInProgress) {
    for image in images(&list.name) {
        let content = Image::scratch().cmd(["none"]);
        cluster.node.runtime.registry.push(&image, &content).unwrap();
    }
    let lists = cluster.api::<ImageListPullJob>();
    let ended = cluster
        .wait_until(lists, &list.name, "ended", |list| {
            list.status
                .as_ref()
                .is_some_and(|status| status.completion_time.is_some())
        })
        .await;
    let status = ended.status.clone().unwrap();
    assert_eq!((status.completed, status.succeeded), (2, 2), "{status:?}");
    assert_eq!(jobs_of(cluster, &ended).await, list.jobs, "{}", list.name);
}
