//! ImageListPullJobs: their ImagePullJobs are fanned out to nodes whose daemons the tests play.

use k8s_openapi::api::core::v1::{Event, ResourceQuota};
use kruise_api::image_list_pull_job::ImageListPullJob;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cluster::Cluster;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::manager_requests::write_requests;
use crate::test_cluster::{
    PullOutcome, create, create_nodes, job, jobs, report_pull, shared_cluster, wait_for_tag, wait_until,
    wait_until_deleted,
};
use crate::waits;

/// A namespace with one node for its jobs.
struct ListFixture {
    admin: Cluster,
    name: &'static str,
    lists: Api<ImageListPullJob>,
    jobs: Api<ImagePullJob>,
}

impl ListFixture {
    async fn new(name: &'static str) -> Self {
        let admin = shared_cluster().admin().await;
        shared_cluster()
            .plane
            .kubectl(&["create", "namespace", name])
            .unwrap();
        create_nodes(&admin, &[name], json!({})).await;
        Self {
            name,
            lists: Api::namespaced(admin.client.clone(), name),
            jobs: Api::namespaced(admin.client.clone(), name),
            admin,
        }
    }

    fn object(&self, spec: Value) -> Value {
        let mut spec = spec;
        spec["selector"] = json!({ "names": [self.name] });
        if spec.get("completionPolicy").is_none() {
            spec["completionPolicy"] = json!({});
        }
        json!({ "metadata": { "name": "release", "namespace": self.name }, "spec": spec })
    }

    async fn create(&self, spec: Value) -> ImageListPullJob {
        create(&self.lists, self.object(spec)).await
    }

    async fn patch(&self, spec: Value) {
        let patch = Patch::Merge(json!({ "spec": spec }));
        let patched = self.lists.patch("release", &PatchParams::default(), &patch).await;
        patched.unwrap();
    }

    /// Waits until there is one ImagePullJob for each of these images, and no other; returns them in this order.
    async fn wait_jobs(&self, images: &[&str]) -> Vec<ImagePullJob> {
        let expected = |found: &[&ImagePullJob]| {
            let mut found: Vec<&str> = found.iter().map(|job| job.spec.image.as_str()).collect();
            found.sort_unstable();
            found == images
        };
        let what = format!("ImagePullJobs for {images:?}");
        let all = kube::runtime::watcher::Config::default();
        let found = waits::watch_until(&what, &String::new, self.jobs.clone(), all, |job| job, expected);
        let mut found = found.await;
        found.sort_by_key(|job| job.spec.image.clone());
        found
    }

    async fn wait_counts(&self, what: &'static str, counts: [i32; 4]) -> ImageListPullJob {
        wait_until(&self.lists, "release", what, move |list| {
            counts_of(list) == counts
        })
        .await
    }

    /// The manager's writes in the namespace, as verb and resource.
    fn writes(&self) -> Vec<String> {
        let all = write_requests(&shared_cluster().plane, self.name).into_iter();
        let all = all.map(|((verb, resource, _), code)| format!("{verb} {resource} {code}"));
        all.filter(|write| !write.contains(" events")).collect()
    }
}

/// Desired, active, completed, succeeded.
fn counts_of(list: &ImageListPullJob) -> [i32; 4] {
    let status = list.status.clone().unwrap_or_default();
    [status.desired, status.active, status.completed, status.succeeded]
}

fn ended(list: &ImageListPullJob) -> bool {
    list.status
        .as_ref()
        .is_some_and(|status| status.completion_time.is_some())
}

/// Type, reason and message of the one condition.
fn condition(list: &ImageListPullJob) -> [String; 3] {
    let conditions = list.status.clone().unwrap_or_default().conditions;
    let [condition] = <[_; 1]>::try_from(conditions).unwrap();
    [condition.type_, condition.reason, condition.message]
}

#[tokio::test]
async fn images_are_pulled_and_failed_ones_are_named() {
    let test = ListFixture::new("lists-pull").await;
    test.create(
        json!({ "images": ["nginx:lists", "busybox:lists"], "parallelism": 1,
        "completionPolicy": { "ttlSecondsAfterFinished": 4 } }),
    )
    .await;
    let [busybox, nginx] =
        <[_; 2]>::try_from(test.wait_jobs(&["busybox:lists", "nginx:lists"]).await).unwrap();
    for image in ["nginx", "busybox"] {
        wait_for_tag(&test.admin, test.name, image, "lists").await;
    }
    test.wait_counts("both active", [2, 2, 0, 0]).await;
    report_pull(&test.admin, test.name, PullOutcome::Failed("no such image")).await;
    let list = wait_until(&test.lists, "release", "ended", ended).await;
    assert_eq!(counts_of(&list), [2, 0, 2, 0]);
    let status = list.status.clone().unwrap();
    let failed = status.failed_image_statuses.iter();
    let failed = failed.map(|failed| (failed.name.clone(), failed.image_pull_job.clone()));
    let expected = [("busybox:lists", &busybox), ("nginx:lists", &nginx)];
    let expected = expected.map(|(image, job)| (image.to_owned(), job.name_any()));
    assert_eq!(failed.collect::<Vec<_>>(), expected);
    assert_eq!(
        condition(&list),
        [
            "Failed",
            "ImagesFailed",
            "failed for 2 of 2 images: busybox:lists, nginx:lists"
        ]
    );
    // The TTL is that of the list: its jobs count for it until it is deleted, and are deleted with it.
    wait_until_deleted(&test.lists, "release").await;
    let created = test.writes();
    let creations = created
        .iter()
        .filter(|write| write.starts_with("create imagepulljobs"));
    assert_eq!(creations.count(), 2, "{created:?}");
    let events = Api::<Event>::namespaced(test.admin.client.clone(), test.name);
    let events = events.list(&ListParams::default()).await.unwrap();
    let mut events = events
        .items
        .iter()
        .filter(|event| event.involved_object.kind.as_deref() == Some("ImageListPullJob"));
    let event = events.next().unwrap();
    let event = [&event.reason, &event.message].map(|text| text.clone().unwrap());
    assert_eq!(event, ["Successful create ImagePullJob", "Create 2 ImagePullJob"]);
}

#[tokio::test]
async fn edited_list_replaces_its_jobs_and_ends_with_the_present_ones() {
    let test = ListFixture::new("lists-edit").await;
    test.create(json!({ "images": ["a:1", "b:1", "c:1"] })).await;
    let first = test.wait_jobs(&["a:1", "b:1", "c:1"]).await;
    for image in ["a", "b", "c"] {
        wait_for_tag(&test.admin, test.name, image, "1").await;
    }
    report_pull(&test.admin, test.name, PullOutcome::Succeeded).await;
    // Its end and an edit cross: whatever comes first, nothing is left half-way.
    let list = wait_until(&test.lists, "release", "ended", ended).await;
    assert_eq!(counts_of(&list), [3, 0, 3, 3]);
    assert_eq!(condition(&list), ["Complete", "ImagesPulled", "pulled 3 images"]);
    let before = test.writes().len();
    test.patch(json!({ "images": ["d:1"] })).await;
    // A list that has ended does nothing more, as in OpenKruise; another one shows that time has passed.
    let mut other = test.object(json!({ "images": ["e:1", "f:1"], "parallelism": 0 }));
    other["metadata"]["name"] = json!("other");
    create(&test.lists, other).await;
    let paused = test.wait_jobs(&["a:1", "b:1", "c:1", "e:1", "f:1"]).await;
    assert_eq!(
        paused[..3].iter().map(ResourceExt::uid).collect::<Vec<_>>(),
        first.iter().map(ResourceExt::uid).collect::<Vec<_>>()
    );
    let after = test.writes().split_off(before);
    assert!(
        after.iter().all(|write| !write.starts_with("delete")),
        "{after:?}"
    );

    let patch = Patch::Merge(json!({ "spec": { "images": ["f:1", "g:1"] } }));
    test.lists
        .patch("other", &PatchParams::default(), &patch)
        .await
        .unwrap();
    let changed = test.wait_jobs(&["a:1", "b:1", "c:1", "f:1", "g:1"]).await;
    assert_eq!(changed[3].uid(), paused[4].uid(), "f is still wanted");
    let patch = Patch::Merge(json!({ "spec": { "parallelism": 1 } }));
    test.lists
        .patch("other", &PatchParams::default(), &patch)
        .await
        .unwrap();
    for image in ["f", "g"] {
        wait_for_tag(&test.admin, test.name, image, "1").await;
    }
    report_pull(&test.admin, test.name, PullOutcome::Succeeded).await;
    let other = wait_until(&test.lists, "other", "ended", ended).await;
    assert_eq!(counts_of(&other), [2, 0, 2, 2]);
    let replaced = test.wait_jobs(&["a:1", "b:1", "c:1", "f:1", "g:1"]).await;
    assert_ne!(replaced[3].uid(), changed[3].uid(), "its spec was changed");
    assert_eq!(
        replaced[3].spec.parallelism,
        Some(serde_json::from_value(json!(1)).unwrap())
    );
}

#[tokio::test]
async fn deleted_list_in_foreground_creates_nothing_more() {
    let test = ListFixture::new("lists-delete").await;
    test.create(json!({ "images": ["a:1", "b:1"], "parallelism": 0 }))
        .await;
    let jobs = test.wait_jobs(&["a:1", "b:1"]).await;
    // There is no garbage collector: the finalizer stays.
    test.lists
        .delete("release", &DeleteParams::foreground())
        .await
        .unwrap();
    for job in &jobs {
        test.jobs
            .delete(&job.name_any(), &DeleteParams::default())
            .await
            .unwrap();
    }
    let mut other = test.object(json!({ "images": ["c:1"], "parallelism": 0 }));
    other["metadata"]["name"] = json!("other");
    create(&test.lists, other).await;
    test.wait_jobs(&["c:1"]).await;
    let list = test.lists.get("release").await.unwrap();
    assert!(list.metadata.deletion_timestamp.is_some());
}

#[tokio::test]
async fn refused_jobs_are_reported_and_created_once_allowed() {
    let test = ListFixture::new("lists-quota").await;
    let quotas = Api::<ResourceQuota>::namespaced(test.admin.client.clone(), test.name);
    let quota = json!({ "metadata": { "name": "jobs" },
        "spec": { "hard": { "count/imagepulljobs.apps.kruise.io": "0" } } });
    create(&quotas, quota).await;
    let used = json!({ "status": { "hard": { "count/imagepulljobs.apps.kruise.io": "0" },
        "used": { "count/imagepulljobs.apps.kruise.io": "0" } } });
    quotas
        .patch_status("jobs", &PatchParams::default(), &Patch::Merge(&used))
        .await
        .unwrap();
    test.create(json!({ "images": ["a:1", "b:1"] })).await;
    let waiting = |list: &ImageListPullJob| {
        list.status
            .as_ref()
            .is_some_and(|status| !status.conditions.is_empty())
    };
    let list = wait_until(&test.lists, "release", "waiting", waiting).await;
    let [type_, reason, message] = condition(&list);
    assert_eq!([type_, reason], ["Waiting", "JobRefused"]);
    let expected = "2 of 2 images have no ImagePullJob, because it cannot be created; a:1: ";
    assert!(
        message.starts_with(expected) && message.contains("exceeded quota: jobs"),
        "{message}"
    );
    // A changed spec is tried at once.
    quotas.delete("jobs", &DeleteParams::default()).await.unwrap();
    test.patch(json!({ "parallelism": 2 })).await;
    test.wait_jobs(&["a:1", "b:1"]).await;
    wait_until(&test.lists, "release", "no longer waiting", move |list| {
        !waiting(list)
    })
    .await;
}

/// What refuses one of them says nothing about the others.
#[tokio::test]
async fn refused_image_stops_no_other() {
    let test = ListFixture::new("lists-policy").await;
    let rule = json!({ "apiGroups": ["apps.kruise.io"], "apiVersions": ["*"], "operations": ["CREATE"],
        "resources": ["imagepulljobs"] });
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": test.name } });
    let policy = json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": test.name }, "spec": {
            "validations": [{ "expression": "object.spec.image != 'a:1'", "message": "this registry is closed" }],
            "matchConstraints": { "resourceRules": [rule], "namespaceSelector": selector } } });
    let binding = json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": test.name }, "spec": { "policyName": test.name, "validationActions": ["Deny"] } });
    for object in [policy, binding] {
        shared_cluster().plane.apply(&object.to_string()).unwrap();
    }
    let mut probe = job(
        "probe",
        json!({ "image": "a:1", "selector": { "names": [test.name] } }),
    );
    probe["metadata"]["namespace"] = json!(test.name);
    let probe: ImagePullJob = serde_json::from_value(probe).unwrap();
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    waits::poll_until("the policy is in effect", &String::new, || async {
        let refused = test.jobs.create(&params, &probe).await.err()?;
        refused
            .to_string()
            .contains("this registry is closed")
            .then_some(())
    })
    .await;
    test.create(json!({ "images": ["a:1", "b:1"] })).await;
    test.wait_jobs(&["b:1"]).await;
    let list = wait_until(
        &test.lists,
        "release",
        "waiting for one image",
        |list: &ImageListPullJob| {
            let conditions = list.status.iter().flat_map(|status| &status.conditions);
            conditions
                .into_iter()
                .any(|one| one.message.starts_with("1 of 2 images"))
        },
    )
    .await;
    let [_, reason, message] = condition(&list);
    assert_eq!(reason, "JobRefused");
    assert!(
        message.contains("a:1") && message.contains("this registry is closed"),
        "{message}"
    );
}

#[tokio::test]
async fn forged_and_foreign_jobs_do_not_count() {
    let test = ListFixture::new("lists-forged").await;
    let list = test.create(json!({ "images": ["a:1"], "parallelism": 0 })).await;
    let own = test.wait_jobs(&["a:1"]).await.remove(0);
    let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImageListPullJob", "name": "release",
        "uid": "11111111-2222-3333-4444-555555555555", "controller": true });
    let paused =
        |image: &str| json!({ "image": image, "parallelism": 0, "selector": { "names": [test.name] } });
    let mut forged = job("forged", paused("b:1"));
    forged["metadata"]["namespace"] = json!(test.name);
    forged["metadata"]["ownerReferences"] = json!([owner]);
    create(&test.jobs, forged).await;
    // No list of another namespace owns it, whatever its UID.
    let mut elsewhere = job("lists-forged-elsewhere", paused("c:1"));
    elsewhere["metadata"]["ownerReferences"] = json!(own.metadata.owner_references);
    create(&jobs(&test.admin), elsewhere).await;
    for (api, name) in [
        (&test.jobs, "forged"),
        (&jobs(&test.admin), "lists-forged-elsewhere"),
    ] {
        let is_seen = |job: &ImagePullJob| job.status.is_some();
        wait_until(api, name, "seen by the manager", is_seen).await;
    }
    test.patch(json!({ "images": ["a:1", "b:1", "c:1"] })).await;
    let found = test.wait_jobs(&["a:1", "b:1", "b:1", "c:1"]).await;
    let owned = found.iter().filter(|job| {
        let mut owners = job.owner_references().iter();
        owners.any(|owner| Some(&owner.uid) == list.metadata.uid.as_ref())
    });
    assert_eq!(owned.count(), 3);
    test.wait_counts("three images", [3, 0, 0, 0]).await;
    assert_eq!(found[0].uid(), own.uid(), "it was not replaced");
}

#[tokio::test]
async fn invalid_lists_are_refused() {
    let test = ListFixture::new("lists-invalid").await;
    let refused = async |spec: Value| {
        let object = serde_json::from_value(test.object(spec)).unwrap();
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        test.lists
            .create(&dry_run, &object)
            .await
            .unwrap_err()
            .to_string()
    };
    for (spec, why) in [
        (json!({ "images": [] }), "spec.images"),
        (json!({ "images": ["a", "a"] }), "Duplicate value"),
        (
            json!({ "images": ["Not Valid"] }),
            "spec.images[0]: Invalid value: \"Not Valid\"",
        ),
        (json!({ "images": vec!["a"; 256] }), "must have at most 255 items"),
        (
            json!({ "images": ["a"], "parallelism": "110%" }),
            "or a percentage from 0% to 100%",
        ),
        (
            json!({ "images": ["a"], "podSelector": { "matchLabels": { "a": "b" } } }),
            "exclude each other",
        ),
        (
            json!({ "images": ["a"], "completionPolicy": { "type": "Never", "ttlSecondsAfterFinished": 1 } }),
            "the job never ends",
        ),
        (
            json!({ "images": ["a"], "pullPolicy": { "timeoutSeconds": 60 },
                "completionPolicy": { "activeDeadlineSeconds": 30 } }),
            "activeDeadlineSeconds is 30, less than",
        ),
    ] {
        let message = refused(spec.clone()).await;
        assert!(message.contains(why), "{spec}: {message}");
    }
}
