//! All labels, annotations, finalizers, condition types and other shared strings.
//!
//! Names are those of OpenKruise unless a constant says that it is ours.

/// Label of a ContainerRecreateRequest: UID of its Pod.
pub const CRR_POD_UID: &str = "crr.apps.kruise.io/pod-uid";
/// Label of a ContainerRecreateRequest: node of its Pod. Daemons select their requests by it.
pub const CRR_NODE_NAME: &str = "crr.apps.kruise.io/node-name";
/// Label of a ContainerRecreateRequest that has not completed; its value is [`TRUE`].
pub const CRR_ACTIVE: &str = "crr.apps.kruise.io/active";
/// Annotation of a v1alpha1 ContainerRecreateRequest: JSON list of v1beta1's `status.containerStatusSnapshot`.
pub const CRR_SYNC_CONTAINER_STATUSES: &str = "crr.apps.kruise.io/sync-container-statuses";
/// Annotation of a v1alpha1 ContainerRecreateRequest (RFC 3339 time): v1beta1's condition [`PRE_RECREATE_GRACE`]. The
/// finalizer that guards the Pod's not-ready key has the same name.
pub const CRR_UNREADY_ACQUIRED: &str = "crr.apps.kruise.io/unready-acquired";
/// Annotation of ours on a v1alpha1 ContainerRecreateRequest: JSON of the conditions that v1alpha1 has no field for.
/// Absent on v1beta1.
pub const CRR_CONDITIONS: &str = "crr.apps.kruise.io/conditions";
/// Annotation of ours on a v1alpha1 NodeImage: JSON `{image: [[namespace, name, mode], …]}`, the modes of its pull
/// secrets, which v1alpha1 has no field for. Absent on v1beta1.
pub const NODE_IMAGE_SECRET_MODES: &str = "apps.kruise.io/pull-secret-modes";

/// Label of virtual nodes (value [`TYPE_VIRTUAL_KUBELET`]), on which no daemon runs, and of requests on them.
pub const TYPE: &str = "type";
/// Value of [`TYPE`] for virtual nodes.
pub const TYPE_VIRTUAL_KUBELET: &str = "virtual-kubelet";
/// Value of labels that are switches.
pub const TRUE: &str = "true";
/// Label of a NodeImage that may exist without a Node (used in tests).
pub const FAKE_NODE_IMAGE: &str = "apps.kruise.io/fake-nodeimage";
/// Label of a Pod with the name of its revision, or the part after the name's last `-`.
pub const CONTROLLER_REVISION_HASH: &str = "controller-revision-hash";

/// Annotation that the daemon adds to the CRI sandbox configuration of a pull.
pub const PULLING_IMAGE_BY: &str = "apps.kruise.io/pulling-image-by";
/// Value of [`PULLING_IMAGE_BY`].
pub const PULLING_IMAGE_BY_DAEMON: &str = "kruise-daemon";
/// Annotation of a copied pull secret: `namespace/name` of its source.
pub const SECRET_SOURCE_KEY: &str = "imagepulljobs.kruise.io/source-key";
/// Annotation of a copied pull secret: sorted, comma-separated `namespace/name` of the jobs that use it.
pub const SECRET_REFERENCES: &str = "imagepulljobs.kruise.io/references";
/// Annotation of a copied pull secret: [`MODE_BATCH`].
pub const SECRET_MODE: &str = "imagepulljobs.kruise.io/mode";
/// Mode of a secret that is shared by jobs and removed with the image it belongs to.
pub const MODE_BATCH: &str = "batch";

/// Finalizer of a PodProbeMarker, until its probes and what they have set are removed.
pub const NODE_POD_PROBE_CLEANUP: &str = "kruise.io/node-pod-probe-cleanup";
/// Pod annotation with the probes that the provider of a virtual node runs, as JSON.
pub const POD_PROBE: &str = "kruise.io/podprobe";
/// Pod annotation with the names of the PodProbeMarkers of [`POD_PROBE`], comma-separated; at creation, users choose
/// them with it.
pub const POD_PROBE_MARKER_LIST: &str = "kruise.io/podprobemarker-list";
/// Pod annotation with the daemon's observations of its containers.
pub const RUNTIME_CONTAINERS_META: &str = "apps.kruise.io/runtime-containers-meta";
/// Label of Pods and claims of a CloneSet: five characters that are also the end of the Pod's name.
pub const CLONESET_INSTANCE_ID: &str = "apps.kruise.io/cloneset-instance-id";
/// Label of a Pod with the short hash of its revision.
pub const POD_TEMPLATE_HASH: &str = "pod-template-hash";
/// Label of a Pod with its [`super::lifecycle::LifecycleStateType`].
pub const LIFECYCLE_STATE: &str = "lifecycle.apps.kruise.io/state";
/// Annotation of a Pod: when label [`LIFECYCLE_STATE`] was set, RFC 3339 in seconds.
pub const LIFECYCLE_TIMESTAMP: &str = "lifecycle.apps.kruise.io/timestamp";
/// Annotation of a Pod that waits for its deletion: the value of [`LIFECYCLE_STATE`] before that, if its update was not
/// finished. It is ours, and is removed when the deletion is cancelled.
pub const LIFECYCLE_STATE_BEFORE_DELETE: &str = "lifecycle.apps.kruise.io/state-before-delete";
/// Labels and annotations that a workload writes into each of its Pods for itself. A template that was copied from a Pod
/// may have them; these are not its values.
pub const OWN_POD_METADATA: [&str; 12] = [
    CONTROLLER_REVISION_HASH,
    POD_TEMPLATE_HASH,
    CLONESET_INSTANCE_ID,
    LIFECYCLE_STATE,
    LIFECYCLE_TIMESTAMP,
    LIFECYCLE_STATE_BEFORE_DELETE,
    IN_PLACE_UPDATE_STATE,
    IN_PLACE_UPDATE_STATE_OLD,
    IN_PLACE_UPDATE_GRACE,
    IN_PLACE_UPDATE_GRACE_OLD,
    IN_PLACE_UPDATE_RESIZING,
    CONTAINER_LAUNCH_COMPLETED,
];
/// Label of a Pod that its workload must delete; any value counts, we write [`TRUE`].
pub const SPECIFIED_DELETE: &str = "apps.kruise.io/specified-delete";
/// Label of a v1alpha1 CloneSet: v1beta1's `scaleStrategy.excludePreparingDelete`, if [`TRUE`].
pub const CLONESET_EXCLUDE_PREPARING_DELETE: &str =
    "apps.kruise.io/cloneset-scaling-exclude-preparing-delete";
/// Annotation of ours on a v1alpha1 CloneSet of type `OnDelete`: `podUpdatePolicy` of v1beta1, which v1alpha1 has no
/// field for. Absent on v1beta1.
pub const CLONESET_POD_UPDATE_POLICY: &str = "apps.kruise.io/cloneset-pod-update-policy";
/// Annotation of a Pod: JSON of [`super::in_place::InPlaceUpdateState`].
pub const IN_PLACE_UPDATE_STATE: &str = "apps.kruise.io/inplace-update-state";
/// The name of [`IN_PLACE_UPDATE_STATE`] in old releases: read if that is absent, removed with every write.
pub const IN_PLACE_UPDATE_STATE_OLD: &str = "inplace-update-state";
/// Annotation of a Pod: JSON of [`super::in_place::InPlaceUpdateGrace`].
pub const IN_PLACE_UPDATE_GRACE: &str = "apps.kruise.io/inplace-update-grace";
/// The name of [`IN_PLACE_UPDATE_GRACE`] in old releases: read if that is absent, removed with every write.
pub const IN_PLACE_UPDATE_GRACE_OLD: &str = "inplace-update-grace";
/// Annotation of ours on a Pod that is being resized: JSON of the containers' previous resources, until the update that
/// needs the resize is recorded.
pub const IN_PLACE_UPDATE_RESIZING: &str = "apps.kruise.io/inplace-update-resizing";
/// Annotation of a v1alpha1 CloneSet: `imagePreDownloadParallelism` of v1beta1.
pub const IMAGE_PRE_DOWNLOAD_PARALLELISM: &str = "apps.kruise.io/image-predownload-parallelism";
/// Annotation of a v1alpha1 CloneSet: `imagePreDownloadTimeoutSeconds` of v1beta1.
pub const IMAGE_PRE_DOWNLOAD_TIMEOUT_SECONDS: &str = "apps.kruise.io/image-predownload-timeout-seconds";
/// Annotation of a v1alpha1 CloneSet: `imagePreDownloadMinUpdatedReadyPods` of v1beta1.
pub const IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS: &str =
    "apps.kruise.io/image-predownload-min-updated-ready-pods";
/// Label of a ControllerRevision (value [`TRUE`]) whose images are pre-downloaded. The spelling is OpenKruise's.
pub const IMAGE_PRE_DOWNLOAD_CREATED: &str = "apps.kruise.io/pre-predownload-created";
/// Label of a ControllerRevision (value [`TRUE`]) whose images need no pre-download.
pub const IMAGE_PRE_DOWNLOAD_IGNORED: &str = "apps.kruise.io/image-predownload-ignored";
/// Label of a ControllerRevision, and of the ImagePullJobs created for it, with its hash.
pub const REVISION_HASH: &str = "controller.kubernetes.io/hash";
/// Annotation of a ControllerRevision: decimal hash of the claim templates, empty when there are none.
pub const VOLUME_CLAIM_TEMPLATE_HASH: &str = "kruise.io/cloneset-volumeclaimtemplate-hash";
/// Annotation of a Pod: integer; of otherwise equal Pods, the one with the lower value is deleted first.
pub const POD_DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Annotation of a Pod template: its containers start in their order, each when those before it are ready.
pub const CONTAINER_LAUNCH_PRIORITY: &str = "apps.kruise.io/container-launch-priority";
/// The only value of [`CONTAINER_LAUNCH_PRIORITY`].
pub const CONTAINER_LAUNCH_ORDERED: &str = "Ordered";
/// Annotation of a Pod (value [`TRUE`]): the last of its containers may start.
pub const CONTAINER_LAUNCH_COMPLETED: &str = "apps.kruise.io/container-launch-priority-completed";
/// Environment variable of a container: integer; containers with a higher one are ready before it starts.
pub const ENV_CONTAINER_PRIORITY: &str = "KRUISE_CONTAINER_PRIORITY";
/// Environment variable of a container whose start is blocked; its value comes from a ConfigMap, key
/// [`CONTAINER_BARRIER_PREFIX`]` + priority`.
pub const ENV_CONTAINER_BARRIER: &str = "KRUISE_CONTAINER_BARRIER";
/// Prefix of the priority in the ConfigMap key of [`ENV_CONTAINER_BARRIER`].
pub const CONTAINER_BARRIER_PREFIX: &str = "p_";
/// End of the name of the ConfigMap of [`ENV_CONTAINER_BARRIER`], behind the name of the Pod.
pub const BARRIER_CONFIG_MAP_SUFFIX: &str = "-barrier";
/// Environment variables with the versions of a Pod's sidecars; they never cause a restart.
pub const ENV_SIDECAR_SET_VERSIONS: [&str; 2] = ["SIDECARSET_VERSION", "SIDECARSET_VERSION_ALT"];
/// Environment variable (value [`TRUE`]) of a sidecar that is terminated once the main containers of its Pod have ended.
pub const ENV_TERMINATE_SIDECAR: &str = "KRUISE_TERMINATE_SIDECAR_WHEN_JOB_EXIT";
/// Environment variable of such a sidecar: the image that it gets on a virtual node.
pub const ENV_TERMINATE_SIDECAR_WITH_IMAGE: &str = "KRUISE_TERMINATE_SIDECAR_WHEN_JOB_EXIT_WITH_IMAGE";
/// Environment variable (value [`TRUE`]) of such a sidecar: the Pod's phase does not depend on its exit code.
pub const ENV_IGNORE_SIDECAR_EXIT_CODE: &str = "KRUISE_TERMINATE_SIDECAR_IGNORE_EXIT_CODE";
/// Label of an object that must not be deleted: [`PROTECT_ALWAYS`] or [`PROTECT_CASCADING`].
pub const DELETE_PROTECTION: &str = "policy.kruise.io/delete-protection";
/// Value of [`DELETE_PROTECTION`]: never.
pub const PROTECT_ALWAYS: &str = "Always";
/// Value of [`DELETE_PROTECTION`]: not while the object has Pods.
pub const PROTECT_CASCADING: &str = "Cascading";
/// `userAgent` of lifecycle hooks in the message of condition [`KRUISE_POD_READY`].
pub const LIFECYCLE_USER_AGENT: &str = "Lifecycle";
/// `key` of a preDelete hook in the message of condition [`KRUISE_POD_READY`].
pub const PRE_DELETE_HOOK: &str = "preDeleteHook";
/// `key` of an inPlaceUpdate hook in the message of condition [`KRUISE_POD_READY`].
pub const PRE_UPDATE_HOOK: &str = "preUpdateHook";

/// Annotation of a SidecarSet and its ControllerRevisions: hash of its containers. Of a Pod: JSON map of what was
/// injected, by the SidecarSet's name.
pub const SIDECAR_SET_HASH: &str = "kruise.io/sidecarset-hash";
/// The same for the containers without their images: a Pod with another value cannot be updated in place.
pub const SIDECAR_SET_HASH_WITHOUT_IMAGE: &str = "kruise.io/sidecarset-hash-without-image";
/// Label of a v1alpha1 SidecarSet: v1beta1's `customVersion`. Label of a ControllerRevision in both versions.
pub const SIDECAR_SET_CUSTOM_VERSION: &str = "apps.kruise.io/sidecarset-custom-version";
/// Annotation of ours on a v1beta1 SidecarSet whose v1alpha1 has a `namespace`: JSON of the `namespaceSelector` that this
/// overrides, or `null`. Absent on v1alpha1.
pub const SIDECAR_SET_NAMESPACE_SELECTOR: &str = "apps.kruise.io/sidecarset-namespace-selector";
/// Annotation of ours on a v1alpha1 SidecarSet: JSON `{"label", "customVersion"}` of v1beta1, if it has label
/// [`SIDECAR_SET_CUSTOM_VERSION`] as well, or if `customVersion` is no label. Absent on v1beta1.
pub const SIDECAR_SET_V1BETA1_VERSION: &str = "apps.kruise.io/sidecarset-v1beta1-version";
/// Label of every Namespace: its name. It is Kubernetes' own.
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";
/// Annotation of a Pod: sorted, comma-separated names of the SidecarSets that were injected.
pub const SIDECAR_SET_INJECTED_LIST: &str = "kruise.io/sidecarset-injected-list";
/// Annotation of a Pod: JSON map of [`super::in_place::InPlaceUpdateState`], by the SidecarSet's name.
pub const SIDECAR_SET_IN_PLACE_UPDATE_STATE: &str = "kruise.io/sidecarset-inplace-update-state";
/// Annotation of a Pod: JSON map from a sidecar to its container that works; the other one has the empty image.
pub const SIDECAR_SET_WORKING_CONTAINER: &str = "kruise.io/sidecarset-working-hotupgrade-container";
/// Prefix of a container's name in the Pod annotation with its version.
pub const SIDECAR_SET_VERSION_PREFIX: &str = "version.sidecarset.kruise.io/";
/// Prefix of a container's name in the Pod annotation with the version of the other container of the same sidecar.
pub const SIDECAR_SET_VERSION_ALT_PREFIX: &str = "versionalt.sidecarset.kruise.io/";
/// Label of a ControllerRevision with the name of its SidecarSet.
pub const SIDECAR_SET_NAME: &str = "kruise.io/sidecarset-name";
/// Pod condition: whether its sidecars can be updated in place. Its message is a JSON map of booleans, by the
/// SidecarSet's name.
pub const SIDECAR_SET_UPGRADABLE: &str = "SidecarSetUpgradable";
/// Annotation of ours on a SidecarSet: `Fail` if its Pods must not be created while no webhook answers. Default: `Ignore`.
pub const SIDECAR_SET_FAILURE_POLICY: &str = "apps.kruise.io/sidecarset-failure-policy";

/// Annotation of a Pod (value [`TRUE`]): another program than kubelet runs its liveness probes.
pub const USING_ENHANCED_LIVENESS: &str = "apps.kruise.io/using-enhanced-liveness";
/// Annotation of such a Pod: JSON list of `{name, livenessProbe}` of its containers.
pub const CONTAINER_PROBE_CONTEXT: &str = "apps.kruise.io/container-probe-context";
/// Environment variable (value [`TRUE`]) of a container that a SidecarSet injected.
pub const ENV_IS_INJECTED: &str = "IS_INJECTED";
/// Annotation of a SidecarSet (value [`TRUE`]) that replaces another one, [`SIDECAR_SET_BASE`], for some Pods.
pub const SIDECAR_SET_CANARY: &str = "apps.kruise.io/sidecarset-canary";
/// Annotation of such a SidecarSet: name of the one that it replaces.
pub const SIDECAR_SET_BASE: &str = "apps.kruise.io/sidecarset-base";

/// Finalizer of an ImagePullJob: its tags and secret copies must be deleted first.
pub const DELETION_PROTECTION: &str = "apps.kruise.io/deletion-protection";

/// Pod condition and readiness gate that keeps a Pod out of its Services.
pub const KRUISE_POD_READY: &str = "KruisePodReady";
/// Pod condition that is false during an in-place update.
pub const IN_PLACE_UPDATE_READY: &str = "InPlaceUpdateReady";
/// Kubelet's message of condition Ready, with reason `ReadinessGatesNotReady`, if only this gate is False.
#[must_use]
pub fn readiness_gate_message(gate: &str) -> String {
    format!("the status of pod readiness gate \"{gate}\" is not \"True\", but False")
}
/// Start of the name of a ContainerRecreateRequest that ends the sidecars of a Pod; the Pod's UID follows.
pub const SIDECAR_TERMINATION_PREFIX: &str = "sidecar-termination-";
/// Start of the name of a ContainerRecreateRequest that restarts a container whose liveness probe failed; the Pod's UID
/// and a hash of the container ID follow.
pub const LIVENESS_PREFIX: &str = "liveness-";
/// Annotation of ours on a ContainerRecreateRequest of one container: ID of the only container that it may stop, as
/// `RUNTIME://ID`. One that has been replaced by then counts as recreated.
pub const CRR_CONTAINER_ID: &str = "crr.apps.kruise.io/container-id";
/// Kubelet's annotation of a mirror Pod, which shows a static Pod of the node.
pub const MIRROR_POD: &str = "kubernetes.io/config.mirror";
/// Pod condition of Pods whose sidecars are being terminated.
pub const SIDECAR_TERMINATED: &str = "SidecarTerminated";
/// Annotation of ours on such a Pod: when its phase was set, so that kubelet takes note at once.
pub const SIDECARS_TERMINATED_AT: &str = "apps.kruise.io/sidecars-terminated-at";
/// Condition of a ContainerRecreateRequest: the Pod was made unready, the grace period starts at its
/// `lastTransitionTime`. Its reason is the same string.
pub const PRE_RECREATE_GRACE: &str = "PreRecreateGrace";
/// Message of condition [`PRE_RECREATE_GRACE`].
pub const PRE_RECREATE_GRACE_MESSAGE: &str =
    "Pod has been forced to not-ready for unreadyGracePeriodSeconds drain";
/// `userAgent` of a ContainerRecreateRequest's entry in the message of condition [`KRUISE_POD_READY`].
pub const NOT_READY_USER_AGENT: &str = "ContainerRecreateRequest";

/// Namespace of the copied pull secrets, unless environment [`ENV_DAEMON_CONFIG_NAMESPACE`] sets a different one.
pub const DAEMON_CONFIG_NAMESPACE: &str = "kruise-daemon-config";
/// Environment variable with the namespace of the copied pull secrets.
pub const ENV_DAEMON_CONFIG_NAMESPACE: &str = "KRUISE_DAEMON_CONFIG_NS";
/// Namespace that both programs are installed in.
pub const SYSTEM_NAMESPACE: &str = "kruise-system";

/// Event reason: an image was pulled.
pub const EVENT_PULL_SUCCEEDED: &str = "PullImageSucceed";
/// Event reason: an image could not be pulled.
pub const EVENT_PULL_FAILED: &str = "PullImageFailed";
/// Message of a tag whose pull was given up at its deadline; exactly OpenKruise's.
pub const DEADLINE_EXCEEDED: &str = "pulling exceeds the activeDeadlineSeconds";
/// Event reason of ours: the API server refuses a job's change of a NodeImage, or the NodeImage has no room for it.
pub const EVENT_NODE_IMAGE_REFUSED: &str = "FailedUpdateNodeImage";
/// Event reason of ours: an object, or a part of it, cannot be read.
pub const EVENT_UNREADABLE: &str = "Unreadable";
/// Event reason of ours: the last attempt of a pull that was given up at its deadline failed.
pub const EVENT_ATTEMPT_FAILED: &str = "PullImageAttemptFailed";
/// Event reason: a container is being stopped.
pub const EVENT_KILLING: &str = "Killing";
/// Event reason: a preStop hook failed.
pub const EVENT_FAILED_PRE_STOP_HOOK: &str = "FailedPreStopHook";
/// Event reason of ours: containers of a request begin to be stopped.
pub const EVENT_RECREATING: &str = "Recreating";

/// Label selector of the requests that the daemon of a node must see.
pub fn crr_selector(node: &str) -> String {
    format!("{CRR_NODE_NAME}={},{CRR_ACTIVE}={TRUE}", node_label(node))
}

/// Label value that identifies a node: its name, or if that is too long for a label its first 46 characters and a hash
/// of the whole (ours; with upstream such nodes cannot have requests at all).
pub fn node_label(node: &str) -> String {
    const MAX_LABEL_CHARS: usize = 63;
    const PREFIX_CHARS: usize = 46;
    if node.len() <= MAX_LABEL_CHARS {
        return node.to_owned();
    }
    let prefix: String = node.chars().take(PREFIX_CHARS).collect();
    format!("{prefix}-{}", short_hash(node))
}

/// FNV-1a (64 bits) of a text, as 16 hexadecimal digits for a name.
pub fn short_hash(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// Service in [`SYSTEM_NAMESPACE`] through which the API server reaches the manager's webhooks.
pub const WEBHOOK_SERVICE: &str = "kruise-webhook-service";
/// Path of the conversion webhook.
pub const CONVERT_PATH: &str = "/convert";
/// ConfigMap in [`SYSTEM_NAMESPACE`] with settings of administrators.
pub const CONFIGURATION: &str = "kruise-configuration";
/// Key in [`CONFIGURATION`]: which annotations SidecarSets may patch.
pub const PATCH_POD_METADATA_WHITELIST: &str = "SidecarSet_PatchPodMetadata_WhiteList";
/// Path of the webhook that changes new Pods.
pub const MUTATE_POD_PATH: &str = "/mutate-pod";
/// Path of the webhook that reviews deletions of Namespaces.
pub const VALIDATE_NAMESPACE_PATH: &str = "/validate-namespace";

/// Fields of a CloneSet's `inPlaceUpdateStrategy` that are annotations in v1alpha1, each with its annotation.
pub const PRE_DOWNLOAD: [(&str, &str); 3] = [
    ("imagePreDownloadParallelism", IMAGE_PRE_DOWNLOAD_PARALLELISM),
    (
        "imagePreDownloadTimeoutSeconds",
        IMAGE_PRE_DOWNLOAD_TIMEOUT_SECONDS,
    ),
    (
        "imagePreDownloadMinUpdatedReadyPods",
        IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS,
    ),
];
