#![allow(clippy::unwrap_used, clippy::panic)]

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use kruise_api::owner::OwnerKind;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn spec(images: &[&str]) -> Value {
    json!({ "images": images, "parallelism": 5, "pullSecrets": ["registry"],
        "completionPolicy": { "ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 900 } })
}

/// What the cluster holds of one job.
struct World {
    observed: Observed,
    now: i64,
}

impl World {
    fn new(spec: Value) -> Self {
        let list = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImageListPullJob", "spec": spec,
            "metadata": { "name": "base", "namespace": "team", "uid": "u", "resourceVersion": "1", "generation": 1 },
        });
        let observed = Observed {
            list: Arc::new(serde_json::from_value(list).unwrap()),
            jobs: Vec::new(),
            terminating: BTreeSet::new(),
        };
        Self { observed, now: 0 }
    }

    fn plan(&self) -> Plan {
        plan(&self.observed, &BTreeMap::new(), at(self.now))
    }

    /// One reconcile: what is planned is done. Deleted ImagePullJobs are gone at the next one.
    fn reconcile(&mut self) -> Plan {
        let plan = self.plan();
        self.now += 1;
        self.observed.terminating.clear();
        if let Some(status) = plan.status.clone() {
            self.edit(|list| list.status = Some(status));
        }
        for (name, uid) in &plan.delete {
            let is_deleted = |job: &ImagePullJob| {
                job.metadata.name.as_ref() == Some(name) && job.metadata.uid.as_ref() == Some(uid)
            };
            let before = self.observed.jobs.len();
            self.observed.jobs.retain(|job| !is_deleted(job));
            assert_eq!(self.observed.jobs.len() + 1, before, "{name} exists");
            self.observed.terminating.insert(name.clone());
        }
        for job in plan.create.clone() {
            self.add(job);
        }
        plan
    }

    fn add(&mut self, mut job: ImagePullJob) {
        let name = job.metadata.name.clone().unwrap();
        let existing = self.observed.jobs.iter();
        let mut names = existing.filter_map(|job| job.metadata.name.as_ref());
        assert!(names.all(|taken| *taken != name), "{name} is taken");
        job.metadata.uid = Some(format!("uid-{}-{name}", self.now));
        job.metadata.creation_timestamp = Some(Time(at(self.now)));
        self.observed.jobs.push(Arc::new(job));
    }

    fn edit(&mut self, change: impl FnOnce(&mut ImageListPullJob)) {
        change(Arc::make_mut(&mut self.observed.list));
    }

    fn set_spec(&mut self, spec: Value) {
        self.edit(|list| list.spec = serde_json::from_value(spec).unwrap());
    }

    fn set_job_status(&mut self, image: &str, status: &Value) {
        let mut jobs = self.observed.jobs.iter_mut();
        let job = jobs.find(|job| job.spec.image == image).unwrap();
        Arc::make_mut(job).status = Some(serde_json::from_value(status.clone()).unwrap());
    }

    fn status(&self) -> ImageListPullJobStatus {
        self.observed.list.status.clone().unwrap_or_default()
    }

    fn has_ended(&self) -> bool {
        self.status().completion_time.is_some()
    }

    /// Desired, active, completed, succeeded.
    fn counts(&self) -> [i32; 4] {
        let status = self.status();
        [status.desired, status.active, status.completed, status.succeeded]
    }

    /// Images of all ImagePullJobs, sorted.
    fn images(&self) -> Vec<&str> {
        let jobs = self.observed.jobs.iter();
        let mut images: Vec<&str> = jobs.map(|job| job.spec.image.as_str()).collect();
        images.sort_unstable();
        images
    }
}

fn running(active: i32) -> Value {
    json!({ "startTime": at(0).to_string(), "desired": 3, "active": active })
}

fn open(succeeded: i32, failed: i32, desired: i32) -> Value {
    json!({ "startTime": at(0).to_string(), "desired": desired, "succeeded": succeeded, "failed": failed })
}

fn ended(succeeded: i32, failed: i32) -> Value {
    let mut status = open(succeeded, failed, succeeded + failed);
    status["completionTime"] = json!(at(9).to_string());
    status
}

#[test]
fn each_image_gets_a_job_with_the_fields_of_the_list() {
    let mut world = World::new(spec(&["b", "a"]));
    let plan = world.reconcile();
    assert_eq!(world.images(), ["a", "b"]);
    for job in &plan.create {
        let owner = Owner::controller(&job.metadata).unwrap();
        let list = Owner {
            kind: OwnerKind::ImageListPullJob,
            name: "base".to_owned(),
            uid: "u".to_owned(),
        };
        assert_eq!(owner, list);
        assert_eq!(job.metadata.namespace.as_deref(), Some("team"));
        assert!(
            job.metadata.labels.is_none(),
            "OpenKruise compares such jobs by their spec"
        );
        let mut expected = spec(&[]);
        expected.as_object_mut().unwrap().remove("images");
        expected["image"] = json!(job.spec.image);
        assert_eq!(json!(job.spec), expected);
    }
    assert_eq!(world.counts(), [2, 0, 0, 0]);
    assert_eq!(world.plan(), Plan::default(), "nothing changed");
}

#[test]
fn status_counts_jobs_and_ends_with_the_last_one() {
    let mut world = World::new(spec(&["c", "a", "b"]));
    world.reconcile();
    world.set_job_status("a", &ended(3, 0));
    world.set_job_status("b", &ended(1, 2));
    world.set_job_status("c", &running(2));
    world.reconcile();
    assert_eq!(world.counts(), [3, 1, 2, 1]);
    assert_eq!(world.status().conditions, []);
    world.set_job_status("c", &ended(3, 0));
    world.reconcile();
    assert_eq!(world.counts(), [3, 0, 3, 2]);
    let status = world.status();
    let mut jobs = world.observed.jobs.iter();
    let job = jobs.find(|job| job.spec.image == "b").unwrap();
    let job = job.metadata.name.clone().unwrap();
    let failed = FailedImageStatus {
        message: format!("Please check for details which nodes failed by 'kubectl get ImagePullJob {job}'."),
        image_pull_job: job,
        name: "b".to_owned(),
    };
    assert_eq!(status.failed_image_statuses, [failed]);
    let condition = &status.conditions[0];
    assert_eq!(
        (condition.type_.as_str(), condition.message.as_str()),
        ("Failed", "failed for 1 of 3 images: b")
    );
    // It has ended: nothing changes it any more, until its TTL is over.
    world.set_spec(spec(&["x"]));
    let plan = world.plan();
    let completed = status.completion_time.unwrap().0;
    let expected = Plan {
        requeue_at: Some(add_seconds(completed, 60)),
        ..Plan::default()
    };
    assert_eq!(plan, expected);
    world.now += 100;
    assert!(world.plan().expired);
}

#[test]
fn removed_image_and_changed_spec_end_nothing_early() {
    let mut world = World::new(spec(&["a", "b", "c"]));
    world.reconcile();
    world.set_job_status("a", &ended(3, 0));
    world.set_job_status("b", &running(1));
    world.set_job_status("c", &ended(3, 0));
    world.set_spec(spec(&["a", "b"]));
    world.reconcile();
    assert_eq!((world.counts(), world.images()), ([2, 1, 1, 1], vec!["a", "b"]));
    assert!(!world.has_ended());
    world.set_job_status("b", &ended(3, 0));
    let mut changed = spec(&["a", "b"]);
    changed["parallelism"] = json!(7);
    world.set_spec(changed);
    world.reconcile();
    assert_eq!((world.counts(), world.images()), ([2, 0, 0, 0], vec!["a", "b"]));
    let jobs = &world.observed.jobs;
    assert!(jobs.iter().all(|job| job.status.is_none()), "all are new");
}

#[test]
fn jobs_of_openkruise_are_kept() {
    let mut world = World::new(spec(&["a"]));
    let list = &world.observed.list;
    // Its webhooks have set defaults in the job, its controller a label and a generated name.
    let mut job = ImagePullJob::new("base-x7k2p", list.spec.job_spec("a").with_defaults());
    job.metadata.owner_references = JobTemplate::new(list).build("a", "x").metadata.owner_references;
    job.metadata.labels = Some([("controller-revision-hash".to_owned(), "other".to_owned())].into());
    let labels = job.metadata.labels.clone();
    world.add(job);
    let plan = world.reconcile();
    assert_eq!((plan.create, plan.delete), (Vec::new(), Vec::new()));
    // A further one of the same spec has the label, too; after a change of the spec it would be wrong.
    world.edit(|list| list.spec.images.push("b".to_owned()));
    assert_eq!(world.plan().create[0].metadata.labels, labels);
    world.edit(|list| drop(list.spec.images.pop()));
    let mut changed = World::new(spec(&["a"]));
    changed.observed.jobs.clone_from(&world.observed.jobs);
    changed.edit(|list| list.spec.pull_secrets.clear());
    assert_eq!(changed.plan().create[0].metadata.labels, None);
    world.set_job_status("a", &ended(2, 0));
    world.reconcile();
    assert!(world.has_ended());
}

#[test]
fn jobs_that_admission_has_changed_are_kept() {
    let mut world = World::new(spec(&["a"]));
    world.reconcile();
    let job = Arc::make_mut(&mut world.observed.jobs[0]);
    job.spec.pull_secrets.push("added".to_owned());
    assert_eq!(world.plan(), Plan::default());
    world.edit(|list| list.spec.pull_secrets.clear());
    assert_eq!(world.plan().delete.len(), 1, "the list was changed");
}

#[test]
fn jobs_that_never_end_leave_their_list_open() {
    let mut never = spec(&["a", "b"]);
    never["completionPolicy"] = json!({ "type": "Never" });
    let mut world = World::new(never);
    world.reconcile();
    world.set_job_status("a", &open(2, 0, 2));
    world.set_job_status("b", &open(0, 0, 0));
    world.reconcile();
    assert_eq!(world.counts(), [2, 0, 1, 1]);
    world.set_job_status("b", &open(1, 1, 2));
    world.reconcile();
    assert_eq!(world.counts(), [2, 0, 2, 1]);
    assert!(!world.has_ended());
}

#[test]
fn invalid_image_counts_as_failed() {
    let mut world = World::new(spec(&["Not Valid"]));
    world.reconcile();
    let mut status = ended(0, 0);
    status["conditions"] = json!([{ "type": "Failed", "status": "True", "reason": "InvalidSpec", "message": "m",
        "lastTransitionTime": at(9).to_string() }]);
    world.set_job_status("Not Valid", &status);
    world.reconcile();
    assert_eq!(world.counts(), [1, 0, 1, 0]);
    assert_eq!(world.status().conditions[0].type_, "Failed");
}

#[test]
fn refused_job_is_reported_and_stops_no_other() {
    let world = World::new(spec(&["a", "b"]));
    let refused = [("b", "exceeded quota"), ("gone", "x")];
    let refused = refused.map(|(image, why)| (image.to_owned(), why.to_owned()));
    let plan = plan(&world.observed, &refused.into(), at(0));
    let created: Vec<&str> = plan.create.iter().map(|job| job.spec.image.as_str()).collect();
    assert_eq!(created, ["a"]);
    let condition = &plan.status.unwrap().conditions[0];
    let condition = [&condition.type_, &condition.reason, &condition.message];
    let message = "1 of 2 images have no ImagePullJob, because it cannot be created; b: exceeded quota";
    assert_eq!(condition, ["Waiting", "JobRefused", message]);
}

#[test]
fn job_that_is_being_deleted_does_nothing() {
    let mut world = World::new(spec(&["a"]));
    world.edit(|list| list.metadata.deletion_timestamp = Some(Time(at(0))));
    assert_eq!(world.plan(), Plan::default());
}

#[test]
fn names_are_valid_and_wait_for_deleted_jobs() {
    let mut world = World::new(spec(&["a"]));
    let longest = format!("{}.{}", "x".repeat(243), "y".repeat(9));
    world.edit(|list| list.metadata.name = Some(longest));
    let plan = world.plan();
    let name = plan.create[0].metadata.name.clone().unwrap();
    assert!(kruise_api::names::is_subdomain(&name), "{name}");
    world.observed.terminating.insert(name.clone());
    assert_eq!(world.plan().create, []);
    // Another image with the same hash.
    let template = JobTemplate::new(&world.observed.list);
    assert_ne!(template.free_name("a", &BTreeSet::from([name.clone()])), name);
}

#[test]
fn long_lists_are_created_a_few_images_at_a_time() {
    let images: Vec<String> = (0..255).map(|n| format!("i{n:03}")).collect();
    let images: Vec<&str> = images.iter().map(String::as_str).collect();
    let mut world = World::new(spec(&images));
    let mut reconciles = 0;
    loop {
        let plan = world.reconcile();
        reconciles += 1;
        assert!(plan.create.len() <= MAX_WRITES);
        let later = plan.create_later.len();
        assert_eq!(later + world.images().len(), 255);
        // The next one follows at once.
        assert_eq!(plan.requeue_at.is_some(), later > 0);
        if later == 0 {
            break;
        }
    }
    assert_eq!((world.images(), reconciles), (images, 16));
}

#[test]
fn jobs_that_are_too_large_in_total_are_refused() {
    let names: Vec<String> = (0..10_000).map(|n| format!("node-{n:020}")).collect();
    let with_images = |count: usize| {
        let images: Vec<String> = (0..count).map(|n| format!("i{n}")).collect();
        World::new(json!({ "images": images, "selector": { "names": names } })).plan()
    };
    assert_eq!(with_images(100).create.len(), MAX_WRITES);
    let refused = with_images(255);
    assert_eq!((refused.create.len(), refused.create_later.len()), (0, 0));
    assert_eq!(refused.requeue_at, None);
    let condition = &refused.status.unwrap().conditions[0];
    let why = "the spec has 273 KiB, for each of 255 images, and 32 MiB are allowed in total; select nodes by labels, or \
               use several jobs";
    let message = format!("255 of 255 images have no ImagePullJob, because it cannot be created; i0: {why}");
    assert_eq!(
        (&*condition.reason, &*condition.message),
        ("JobRefused", &*message)
    );
}

#[derive(Clone, Debug)]
enum Event {
    /// Images by number.
    Images(Vec<u8>),
    Parallelism(u8),
    /// The ImagePullJob of that index ends with that many nodes that succeeded and failed.
    End(usize, i32, i32),
    /// A user deletes the ImagePullJob of that index.
    Delete(usize),
    Reconcile,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        proptest::collection::vec(0_u8..6, 1..6).prop_map(Event::Images),
        (1_u8..4).prop_map(Event::Parallelism),
        (0_usize..6, 0..3, 0..3).prop_map(|(job, good, bad)| Event::End(job, good, bad)),
        (0_usize..6).prop_map(Event::Delete),
        Just(Event::Reconcile),
    ]
}

fn apply(world: &mut World, event: Event) {
    match event {
        Event::Images(images) => {
            let images: BTreeSet<String> = images.iter().map(|n| format!("image-{n}")).collect();
            world.edit(|list| list.spec.images = images.into_iter().collect());
        }
        Event::Parallelism(number) => world.edit(|list| {
            list.spec.parallelism = Some(serde_json::from_value(json!(number)).unwrap());
        }),
        Event::End(job, succeeded, failed) => {
            let job = world.observed.jobs.get(job);
            if let Some(image) = job.map(|job| job.spec.image.clone()) {
                world.set_job_status(&image, &ended(succeeded, failed));
            }
        }
        Event::Delete(job) => {
            if job < world.observed.jobs.len() {
                world.observed.jobs.remove(job);
            }
        }
        Event::Reconcile => drop(world.reconcile()),
    }
}

proptest! {
    /// Whatever happens: a job ends only when the ImagePullJobs of all its images have. Otherwise there is one with the
    /// present spec for each image after two reconciles, and the third one has nothing to do.
    #[test]
    fn any_history_converges(events in proptest::collection::vec(event(), 0..40)) {
        let mut world = World::new(spec(&["image-0"]));
        for event in events {
            let had_ended = world.has_ended();
            apply(&mut world, event);
            if world.has_ended() && !had_ended {
                let images: Vec<&str> = world.observed.list.spec.images.iter().map(String::as_str).collect();
                prop_assert_eq!(world.images(), images);
                let statuses = world.observed.jobs.iter().filter_map(|job| job.status.as_ref());
                let ended = statuses.filter(|status| status.completion_time.is_some());
                prop_assert_eq!(ended.count(), world.observed.jobs.len());
            }
        }
        for _ in 0..2 {
            if !world.has_ended() {
                world.reconcile();
            }
        }
        if !world.has_ended() {
            let list = &world.observed.list.spec;
            prop_assert_eq!(world.images(), list.images.iter().map(String::as_str).collect::<Vec<_>>());
            for job in &world.observed.jobs {
                prop_assert_eq!(&job.spec, &list.job_spec(&job.spec.image));
            }
            prop_assert_eq!(world.plan(), Plan::default());
        }
    }
}
