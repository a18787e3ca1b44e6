//! Updates that supersede incomplete ones, with a kubelet that lags.

use std::borrow::Cow;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::completion_proofs::report_runtime_hashes;
use super::*;
use kruise_api::container_hash::plain_hash;

/// The kubelet of a Pod with one container `main`: what it has read, runs and reported.
struct FakeKubelet {
    pod: Value,
    /// Image and CPU of the spec that it has read.
    read: (String, String),
    /// Generation of that spec.
    generation: i64,
    /// Number and image of the running container.
    runs: (u32, String),
    /// Whether it reports the generation of its status.
    tells: bool,
    /// Whether the daemon reports what the running container was started with.
    daemon: bool,
}

impl FakeKubelet {
    fn new(reports_generation: bool) -> Self {
        let mut kubelet = Self {
            pod: pod(&["main"]),
            read: ("main:1".to_owned(), "1".to_owned()),
            generation: 1,
            runs: (0, "main:1".to_owned()),
            tells: reports_generation,
            daemon: false,
        };
        kubelet.pod["metadata"]["generation"] = json!(1);
        kubelet.pod["metadata"]["resourceVersion"] = json!("1");
        kubelet.pod["spec"]["containers"][0]["resources"] = cpu("1");
        kubelet.report();
        kubelet
    }

    /// The workload changes the image of the Pod.
    fn update(&mut self, image: &str) {
        self.change(&images(&[("main", image)]), false);
    }

    /// The same after another client has changed the Pod; the workload has not observed that, but the kubelet has.
    fn update_with_stale_pod(&mut self, image: &str) {
        let spec = images(&[("main", image)]);
        let stale = Pod::from_json(&self.pod);
        self.bump_resource_version(true);
        self.sync();
        let writes = begin(&stale, &target_revision(&self.pod, &spec), &spec);
        if !self.apply_writes(&writes, false) {
            // The workload retries with the current Pod.
            self.change(&spec, false);
        }
    }

    /// The API server has stored a new version of the Pod.
    fn bump_resource_version(&mut self, other: bool) {
        let metadata = &mut self.pod["metadata"];
        let version: u64 = metadata["resourceVersion"]
            .as_str()
            .map_or(0, |v| v.parse().unwrap());
        metadata["resourceVersion"] = json!((version + 1).to_string());
        if other {
            metadata["generation"] = json!(metadata["generation"].as_i64().unwrap() + 1);
        }
    }

    /// The workload changes image and resources; the kubelet may sync in between.
    fn resize(&mut self, image: &str, to: &str, between: bool) {
        let mut spec = images(&[("main", image)]);
        let resources = serde_json::from_value(cpu(to)).unwrap();
        spec.container_resources.insert("main".to_owned(), resources);
        self.change(&spec, between);
    }

    /// The API server applies one write after another, and counts those that change the spec.
    fn change(&mut self, spec: &Spec, between: bool) {
        let writes = begin(
            &Pod::from_json(&self.pod),
            &target_revision(&self.pod, spec),
            spec,
        );
        assert!(self.apply_writes(&writes, between), "no concurrent write");
    }

    /// Returns whether all writes were applied; they are refused if the Pod is not the requested version.
    fn apply_writes(&mut self, writes: &[PodWrite], between: bool) -> bool {
        let mut answer = None;
        for write in writes {
            let before = self.pod["spec"].clone();
            let patch = answer
                .as_ref()
                .map_or(Cow::Borrowed(&write.patch), |pod| write.rebased_on(pod));
            let required_version = &patch["metadata"]["resourceVersion"];
            if required_version.is_string() && *required_version != self.pod["metadata"]["resourceVersion"] {
                return false;
            }
            apply(&mut self.pod, &patch);
            self.bump_resource_version(self.pod["spec"] != before);
            answer = Some(Pod::from_json(&self.pod));
            if between && write.target == PatchTarget::Resize {
                self.sync();
            }
        }
        true
    }

    fn running_image(&self) -> String {
        self.pod["spec"]["containers"][0]["image"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    /// Reads the spec, reports what runs, and then acts.
    fn sync(&mut self) {
        let cpu = &self.pod["spec"]["containers"][0]["resources"]["requests"]["cpu"];
        self.read = (self.running_image(), cpu.as_str().unwrap().to_owned());
        self.generation = self.pod["metadata"]["generation"].as_i64().unwrap();
        self.report();
        if self.runs.1 != self.read.0 {
            self.restart();
        }
    }

    /// Starts a new container with the image that it read last, without reporting it.
    fn restart(&mut self) {
        self.runs = (self.runs.0 + 1, self.read.0.clone());
    }

    fn report(&mut self) {
        let (number, image) = &self.runs;
        let status = &mut self.pod["status"]["containerStatuses"][0];
        status["containerID"] = json!(format!("containerd://{number}"));
        status["image"] = json!(format!("docker.io/library/{image}"));
        status["imageID"] = json!(format!("sha256:{image}"));
        status["restartCount"] = json!(number);
        status["resources"] = cpu(&self.read.1);
        if self.tells {
            self.pod["status"]["observedGeneration"] = json!(self.generation);
        }
        if self.daemon {
            let (id, hash) = (format!("containerd://{number}"), plain_hash("main", image));
            report_runtime_hashes(&mut self.pod, &id, hash, 0);
        }
    }

    fn assert_waits(&self, why: &str) {
        match progress(&Pod::from_json(&self.pod)) {
            UpdateProgress::Waiting(waiting) => assert!(waiting.to_string().contains(why), "{waiting}"),
            UpdateProgress::Done => panic!("complete, although {why}"),
        }
    }

    fn is_done(&self) -> bool {
        progress(&Pod::from_json(&self.pod)) == UpdateProgress::Done
    }
}

fn cpu(cpu: &str) -> Value {
    json!({ "requests": { "cpu": cpu } })
}

#[test]
fn container_of_superseded_update_is_no_proof() {
    for tells in [false, true] {
        let mut kubelet = FakeKubelet::new(tells);
        kubelet.update("main:2");
        kubelet.sync();
        kubelet.update("main:3");
        kubelet.report();
        kubelet.assert_waits(if tells {
            "not seen"
        } else {
            "the new image is not confirmed yet"
        });
        kubelet.sync();
        kubelet.assert_waits("the new image is not confirmed yet");
        kubelet.report();
        assert!(kubelet.is_done());
    }
}

#[test]
fn rollback_waits_until_kubelet_observed_it() {
    let mut kubelet = FakeKubelet::new(true);
    kubelet.update("main:2");
    kubelet.update("main:1");
    kubelet.assert_waits("not seen");
    kubelet.sync();
    assert!(kubelet.is_done() && kubelet.runs.0 == 0, "it was never replaced");

    let mut kubelet = FakeKubelet::new(true);
    kubelet.update("main:2");
    kubelet.sync();
    kubelet.update("main:1");
    kubelet.report();
    kubelet.assert_waits("not seen");
    kubelet.sync();
    kubelet.assert_waits("the new image is not confirmed yet");
    kubelet.report();
    assert!(kubelet.is_done());
}

#[test]
fn rollback_keeps_container_restarted_after_crash() {
    let mut kubelet = FakeKubelet::new(true);
    kubelet.update("main:2");
    kubelet.restart();
    kubelet.report();
    kubelet.update("main:1");
    kubelet.assert_waits("not seen");
    kubelet.sync();
    assert!(kubelet.is_done() && kubelet.runs.0 == 1, "it was never replaced");
}

#[test]
fn image_by_digest_is_matched_by_image_id() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let mut kubelet = FakeKubelet::new(true);
    kubelet.update("main:2");
    kubelet.update(&format!("main@{digest}"));
    kubelet.sync();
    kubelet.report();
    let status = &mut kubelet.pod["status"]["containerStatuses"][0];
    status["image"] = json!("docker.io/library/main:3");
    status["imageID"] = json!("docker.io/library/main@sha256:other");
    kubelet.assert_waits("the new image is not confirmed yet");
    kubelet.pod["status"]["containerStatuses"][0]["imageID"] =
        json!(format!("docker.io/library/main@{digest}"));
    assert!(kubelet.is_done());
}

/// A kubelet of an older release does not write the generation, and keeps that of the previous kubelet.
#[test]
fn stale_observed_generation_loses_to_daemon_hash() {
    let mut kubelet = FakeKubelet::new(true);
    kubelet.tells = false;
    kubelet.update("main:2");
    kubelet.sync();
    kubelet.report();
    kubelet.assert_waits("not seen");
    kubelet.daemon = true;
    kubelet.report();
    assert!(kubelet.is_done());
    // A daemon report about an earlier container proves nothing about the next one.
    kubelet.update("main:3");
    kubelet.report();
    kubelet.assert_waits("not seen");
}

#[test]
fn superseded_patch_may_still_apply_despite_daemon() {
    let mut kubelet = FakeKubelet::new(true);
    kubelet.daemon = true;
    kubelet.update("main:2");
    kubelet.update("main:1");
    kubelet.restart();
    kubelet.report();
    kubelet.assert_waits("not seen");

    let mut kubelet = FakeKubelet::new(true);
    kubelet.daemon = true;
    kubelet.update("main:2");
    kubelet.sync();
    kubelet.update("main:3");
    kubelet.update("main:2");
    kubelet.report();
    kubelet.assert_waits("not seen");
    kubelet.sync();
    assert!(kubelet.is_done() && kubelet.runs.0 == 1, "it stays");
}

/// kubelet sees the new size and, in between, an image that it will run.
#[test]
fn rollback_with_resize_waits_for_image_generation() {
    let mut kubelet = FakeKubelet::new(true);
    kubelet.resize("main:2", "2", false);
    kubelet.resize("main:1", "1", true);
    kubelet.assert_waits("not seen");
    kubelet.report();
    kubelet.assert_waits("not seen");
    kubelet.sync();
    kubelet.assert_waits("the new image is not confirmed yet");
    kubelet.report();
    assert!(
        kubelet.is_done() && kubelet.runs.0 == 2,
        "replaced by the new image, and back again"
    );
}

/// kubelet has seen a change of another client that the workload has not observed.
#[test]
fn rollback_waits_for_its_own_generation() {
    let mut kubelet = FakeKubelet::new(true);
    kubelet.update("main:2");
    kubelet.update_with_stale_pod("main:1");
    kubelet.assert_waits("not seen");
    kubelet.report();
    kubelet.assert_waits("not seen");
    kubelet.sync();
    kubelet.assert_waits("the new image is not confirmed yet");
    kubelet.report();
    assert!(kubelet.is_done() && kubelet.runs.0 == 2);
}

#[test]
fn unchanged_size_raises_no_generation() {
    let mut kubelet = FakeKubelet::new(true);
    kubelet.update("main:2");
    kubelet.resize("main:1", "1", true);
    let state = update_state(&Pod::from_json(&kubelet.pod)).unwrap().unwrap();
    assert_eq!(state.last_container_statuses["main"].generation, Some(2));
    kubelet.sync();
    kubelet.report();
    assert!(kubelet.is_done());
}

#[derive(Clone, Debug)]
enum KubeletEvent {
    Update(u8),
    /// After another client has changed the Pod.
    Late(u8),
    /// With a size; the kubelet may sync in between.
    Resize(u8, u8, bool),
    Sync,
    Crash,
    Report,
    /// The kubelet is of a release that does not write the generation.
    Downgrade,
}

fn kubelet_events() -> impl Strategy<Value = Vec<KubeletEvent>> {
    let event = prop_oneof![
        3 => (1..4_u8).prop_map(KubeletEvent::Update),
        1 => (1..4_u8).prop_map(KubeletEvent::Late),
        2 => (1..4_u8, 1..3_u8, any::<bool>()).prop_map(|(image, cpu, sync)| KubeletEvent::Resize(image, cpu, sync)),
        2 => Just(KubeletEvent::Sync),
        1 => Just(KubeletEvent::Crash),
        2 => Just(KubeletEvent::Report),
        1 => Just(KubeletEvent::Downgrade),
    ];
    prop::collection::vec(event, 1..25)
}

proptest! {
    /// Whatever happens in between: a complete update runs the image of the spec and keeps running it, and every update
    /// completes once kubelet has caught up.
    #[test]
    fn completed_update_runs_the_image_and_stays(events in kubelet_events(), daemon in any::<bool>()) {
        let mut kubelet = FakeKubelet::new(true);
        kubelet.daemon = daemon;
        for event in events {
            match event {
                KubeletEvent::Update(image) => kubelet.update(&format!("main:{image}")),
                KubeletEvent::Late(image) => kubelet.update_with_stale_pod(&format!("main:{image}")),
                KubeletEvent::Resize(image, cpu, between) => {
                    kubelet.resize(&format!("main:{image}"), &cpu.to_string(), between);
                }
                KubeletEvent::Sync => kubelet.sync(),
                KubeletEvent::Crash => kubelet.restart(),
                KubeletEvent::Report => kubelet.report(),
                KubeletEvent::Downgrade => kubelet.tells = false,
            }
            if kubelet.is_done() {
                let shown = &kubelet.pod["status"]["containerStatuses"][0]["image"];
                prop_assert_eq!(shown, &json!(format!("docker.io/library/{}", kubelet.running_image())));
                prop_assert_eq!(&kubelet.read.0, &kubelet.running_image());
                prop_assert_eq!(&kubelet.runs.1, &kubelet.running_image());
            }
        }
        kubelet.tells = true;
        kubelet.sync();
        kubelet.report();
        prop_assert!(kubelet.is_done());
    }
}
